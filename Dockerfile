# FewLabel for CPUs: docker build --build-arg PYTORCH_CPU=... -t fewlabel . && docker run --rm --user "$(id -u)" -v "$PWD:/work" fewlabel run --method labels-only
FROM python:3.12-slim

# First PyTorch without CUDA, so that FewLabel does not bring the CUDA build: 0.9 GB instead of 5.8 GB. PyTorch's page
# "Get started" names the index for CPUs.
ARG PYTORCH_CPU
RUN pip install --no-cache-dir torch --index-url "$PYTORCH_CPU"

COPY pyproject.toml README.md LICENSE /source/
COPY fewlabel /source/fewlabel
RUN pip install --no-cache-dir /source && rm -rf /source

# What FewLabel writes belongs to this user; use --user "$(id -u)" to own it yourself. Such a user has no home, so caches
# go where everybody may write.
ENV XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/matplotlib
RUN useradd --create-home fewlabel && install --directory --owner fewlabel /work
USER fewlabel
WORKDIR /work
ENTRYPOINT ["fewlabel"]
CMD ["--help"]
