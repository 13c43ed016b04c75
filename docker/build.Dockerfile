# The image in which stages run: CUDA 12.8 runtime on Ubuntu 24.04, Python 3.12, the hashed build lock.
FROM docker.io/nvidia/cuda:12.8.1-runtime-ubuntu24.04@sha256:828c4d878adcaa4265d80c95d8ec877149b49bb2419a4cf3bb6aa889bbb7ca2e
ARG DEBIAN_FRONTEND=noninteractive
# gcc and the headers are for Triton, which compiles its launchers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY lock/build.txt /opt/lock/
RUN python3.12 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /opt/lock/build.txt
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG LOCKED
LABEL org.draftmill.image=build org.draftmill.locked=$LOCKED org.draftmill.system="Ubuntu 24.04"
# A stage runs as whoever calls it (docker/run); nobody runs as root by oversight.
USER 65534:65534
