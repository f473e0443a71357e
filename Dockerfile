# accel-run on a CPU, or with CUDA: docs/scale.md has the commands.
#
# BASE         an image with Python 3.11 or newer, or one that gets it from PACKAGES
# PACKAGES     Debian packages besides; compile= needs g++, on a CPU and for Triton's launchers with CUDA
# TORCH_INDEX  address of another build of torch than pip finds by itself
# EXTRAS       of pyproject.toml
ARG BASE=python:3.11.14-slim-bookworm
FROM ${BASE}

# The base image and its day fix the versions of these packages.
ARG PACKAGES="g++"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update && \
        apt-get install --yes --no-install-recommends $PACKAGES && \
        rm -rf /var/lib/apt/lists/*; \
    fi

WORKDIR /opt/source
COPY pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/
COPY conf conf
COPY runner runner
COPY tasks tasks

# torch alone first, as scripts/setup.sh does: the largest download. Versions are those of the constraints.
ARG TORCH_INDEX=""
ARG EXTRAS=tasks
RUN python3 -m venv /opt/accel-run && \
    /opt/accel-run/bin/python -m pip install --no-cache-dir --constraint scripts/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch && \
    /opt/accel-run/bin/python -m pip install --no-cache-dir --constraint scripts/constraints.txt ".[$EXTRAS]"

ENV PATH=/opt/accel-run/bin:$PATH
RUN useradd --create-home --uid 10001 user && mkdir /home/user/outputs && chown user:user /home/user/outputs
USER 10001
WORKDIR /home/user
ENTRYPOINT ["accel-run"]
CMD ["--help"]
