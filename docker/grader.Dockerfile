# The grader's twin, as the contest describes that machine: no CUDA compiler, an unprivileged user, and in /opt/venv
# a Python 3.12 with pip, numpy, pillow, safetensors, httpx, torch==2.8.0 and transformers==4.57.1.
FROM docker.io/nvidia/cuda:12.8.1-runtime-ubuntu24.04@sha256:828c4d878adcaa4265d80c95d8ec877149b49bb2419a4cf3bb6aa889bbb7ca2e
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
COPY lock/grader.txt /opt/lock/
RUN python3.12 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --only-binary :all: --require-hashes --requirement /opt/lock/grader.txt \
    && mkdir -p /submission \
    && chown -R 12345:12345 /opt/venv /submission
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ARG LOCKED
LABEL org.draftmill.image=grader org.draftmill.locked=$LOCKED org.draftmill.system="Ubuntu 24.04"
USER 12345:12345
