# One image for both programs: durable-timer and notify-consumer.

FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src

# What the programs need, and nothing of what only developers need.
COPY requirements-runtime.lock ./
RUN python -m venv /opt/durable-timer \
 && /opt/durable-timer/bin/pip install --require-hashes -r requirements-runtime.lock

# The build backend comes from the lock of the checkout, with hashes too; it stays behind in this stage.
COPY requirements.lock ./
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY timer_service ./timer_service
COPY notify_consumer ./notify_consumer
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && /opt/durable-timer/bin/pip install --no-deps --no-index /dist/*.whl


FROM python:3.11-slim
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin durable \
 && install -d -o durable -g durable /data /handlers
COPY --from=build /opt/durable-timer /opt/durable-timer
# Handler modules of the notify consumer are mounted into /handlers; an SQLite outbox goes to /data.
ENV PATH=/opt/durable-timer/bin:$PATH \
    PYTHONPATH=/handlers \
    PYTHONUNBUFFERED=1
WORKDIR /data
USER durable
CMD ["durable-timer", "serve"]
