"""The Kubernetes manifest of docs/scale.md is valid, and the scripts use valid arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.config.configuration import compose
from runner.config.request import Request

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MANIFEST = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")

# Schemas of the used fields of JobSet v1alpha2, batch/v1 and v1: `!` marks required fields. Other fields are rejected,
# as by `kubectl apply --dry-run=client --validate=strict`.
FIELD_REF = {"fieldPath!": str, "apiVersion": str}
CONTAINER = {
    "name!": LABEL,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str, "valueFrom": {"fieldRef": FIELD_REF}}],
    "ports": [{"containerPort!": int, "name": str, "protocol": str}],
    "resources": {"limits": QUANTITY, "requests": QUANTITY},
    "volumeMounts": [{"name!": LABEL, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": LABEL,
    "persistentVolumeClaim": {"claimName!": LABEL},
    "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
}
POD = {
    "restartPolicy!": ("Never", "OnFailure"),  # the only policy that a Job accepts
    "terminationGracePeriodSeconds": int,
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}
JOB = {
    "completionMode": ("Indexed", "NonIndexed"),
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "template!": {"metadata": {"labels": str}, "spec!": POD},
}
JOBSET = {
    "apiVersion!": ("jobset.x-k8s.io/v1alpha2",),
    "kind!": ("JobSet",),
    "metadata!": {"name!": LABEL},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "subdomain": LABEL},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs!": [{"name!": LABEL, "replicas": int, "template!": {"spec!": JOB}}],
    },
}


def find_faults(value: Any, schema: Any, where: str = "") -> Iterator[str]:
    """Yield the errors that an API server would report."""
    if isinstance(schema, dict):
        if not isinstance(value, Mapping):
            yield f"{where} must be a mapping"
            return
        known = {field.rstrip("!"): inner for field, inner in schema.items()}
        yield from (
            f"{where}.{field[:-1]} is missing" for field in schema if field[-1] == "!" and field[:-1] not in value
        )
        for field, inner in value.items():
            if field in known:
                yield from find_faults(inner, known[field], f"{where}.{field}")
            else:
                yield f"{where}.{field} is unknown"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{where} must be a list"
            return
        for number, inner in enumerate(value):
            yield from find_faults(inner, schema[0], f"{where}[{number}]")
    elif schema is QUANTITY and isinstance(value, Mapping):
        for name, inner in value.items():
            yield from find_faults(inner, schema, f"{where}.{name}")
    elif isinstance(schema, re.Pattern):
        if schema.fullmatch(str(value)) is None:
            yield f"{where} must match {schema.pattern}, but is {value}"
    elif isinstance(schema, tuple):
        if value not in schema:
            yield f"{where} must be one of {schema}, but is {value}"
    elif not isinstance(value, schema) or (schema is int and isinstance(value, bool)):
        yield f"{where} must be {schema.__name__}, but is {value!r}"


def test_the_kubernetes_manifest_matches_the_api_schema() -> None:
    assert list(find_faults(MANIFEST, JOBSET)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda pod: pod.pop("restartPolicy"), "restartPolicy is missing"),
        (lambda pod: pod.update(restartPolicy="Always"), "must be one of"),
        (lambda pod: pod.update(nodes=2), "nodes is unknown"),
        (lambda pod: pod["containers"][0].update(name="Train!"), "must match"),
        (lambda pod: pod["containers"][0].update(command="torchrun"), "must be a list"),
        (lambda pod: pod["containers"][0]["env"][1].update(value=100), "must be str"),
        (lambda pod: pod["containers"][0]["resources"]["limits"].update(memory="128 GB"), "must match"),
    ],
)
def test_an_invalid_kubernetes_manifest_is_detected(change: Any, expected: str) -> None:
    spoiled = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
    change(spoiled["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])
    (fault,) = find_faults(spoiled, JOBSET)
    assert expected in fault


def test_numbers_in_the_manifest_are_consistent() -> None:
    (replicated,) = MANIFEST["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    torchrun, *rest = container["command"]
    begin = rest.index("-m")
    flags = dict(word.removeprefix("--").split("=", 1) for word in rest[:begin])
    assert torchrun == "torchrun"
    assert int(flags["nnodes"]) == job["parallelism"] == job["completions"]
    assert int(flags["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    name = MANIFEST["metadata"]["name"]
    assert flags["master-addr"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert int(flags["master-port"]) == container["ports"][0]["containerPort"]
    environment = {row["name"]: row for row in container["env"]}
    assert flags["node-rank"] == "$(MACHINE)"
    assert "job-completion-index" in environment["MACHINE"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]) < pod["terminationGracePeriodSeconds"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert rest[begin : begin + 3] == ["-m", "runner", "train"]
    settings = compose(Request(tuple(rest[begin + 3 :]))).settings
    assert settings.output_root in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert settings.run, "without a run name, the next start would not resume this run"
