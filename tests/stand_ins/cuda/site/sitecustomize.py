"""Install the stand-in as soon as a process imports torch, because this folder is first on PYTHONPATH."""

import importlib.abc
import importlib.machinery
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Wrap the loader of torch, to call `install` at the end of the import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _and_install(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _and_install(load):
    def exec_module(module):
        load(module)
        from tests.stand_ins.cuda.install import install

        install()

    return exec_module


sys.meta_path.insert(0, _AfterTorch())
