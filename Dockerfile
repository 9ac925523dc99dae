# kvferry with its own engine, on CPUs: docker build -t kvferry .
# With CUDA: --build-arg TORCH=torch==2.13.0 --build-arg TORCH_INDEX=https://pypi.org/simple --build-arg EXTRAS=kubernetes,nixl,tp
FROM debian:bookworm-slim AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=events,kubernetes,picker,tp,valkey
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/kvferry
RUN /opt/kvferry/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" "$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN /opt/kvferry/bin/pip install --no-cache-dir "/src[$EXTRAS]"

# The compiler stays: kernels are made for the processor that runs them, at first use, into the user's cache.
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 g++ ca-certificates && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 1000 kvferry && useradd --uid 1000 --gid 1000 --home-dir /cache --no-create-home kvferry
RUN install -d -o kvferry -g kvferry /cache /models
COPY --from=build /opt/kvferry /opt/kvferry
ENV PATH=/opt/kvferry/bin:/usr/local/bin:/usr/bin:/bin HOME=/cache HF_HOME=/models PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8000
ENTRYPOINT []
CMD ["kvferry", "--help"]
