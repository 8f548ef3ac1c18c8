# The service in a container, by `docker build --tag bkn-zoo .`; for NVIDIA's GPUs add `--target gpu`.
FROM python:3.12-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    BKN_ZOO_HOST=0.0.0.0 BKN_ZOO_PORT=8000 BKN_ZOO_CHECKPOINTS=/checkpoints \
    HOME=/tmp HF_HOME=/tmp/huggingface BKN_ZOO_CACHE=off
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['BKN_ZOO_PORT']), timeout=4); c.request('GET', '/health/ready'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["bkn-zoo"]
CMD ["serve"]

FROM base AS gpu
# Triton compiles what launches its kernels by a C compiler. PyPI's PyTorch brings all of CUDA but the driver.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install "torch>=2.11" torchvision
COPY pyproject.toml README.md LICENSE /source/
COPY bkn_zoo /source/bkn_zoo
COPY service /source/service
RUN pip install "/source[serve]" && rm -rf /source
COPY checkpoints /checkpoints
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

FROM base AS cpu
# PyTorch's own index has it without CUDA, which is a tenth of the size.
RUN pip install "torch>=2.11" torchvision --index-url https://download.pytorch.org/whl/cpu
COPY pyproject.toml README.md LICENSE /source/
COPY bkn_zoo /source/bkn_zoo
COPY service /source/service
RUN pip install "/source[serve,openvino]" && rm -rf /source
COPY checkpoints /checkpoints
USER 10001:10001
