# docker build -t specserve . && docker run --gpus all -p 3000:3000 -v specserve-cache:/home/specserve/.cache \
#     specserve --model-id HuggingFaceTB/SmolLM2-135M-Instruct
FROM python:3.11-slim AS build
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev make && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# The same commands that CI runs: a virtual environment under the pinned torch, and the wheel.
RUN python3 -m venv .venv && make wheel

FROM python:3.11-slim
ENV PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# libgomp: the CPU kernels are OpenMP code.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 specserve
COPY --from=build /src/dist/ /src/.ci/constraints.txt /tmp/install/
RUN pip install -c /tmp/install/constraints.txt /tmp/install/*.whl && rm -rf /tmp/install
USER specserve
WORKDIR /home/specserve
# Docker sets HOSTNAME to the container's name, so the address is given as a flag.
EXPOSE 3000
STOPSIGNAL SIGTERM
ENTRYPOINT ["specserve", "serve", "--hostname", "0.0.0.0", "--port", "3000"]
