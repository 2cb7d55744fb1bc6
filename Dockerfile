# The explorer as a public, read-only server: no files, searches of at most 20 s. Built by `make image`.
FROM python:3.13-slim AS build
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[serve]'

FROM python:3.13-slim
RUN useradd --create-home --uid 1000 user
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels 'shapewright[serve]' && rm -rf /wheels
USER user
WORKDIR /home/user
ENV SPACE_HOST=localhost
EXPOSE 7860
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:7860/api/v1')"]
CMD ["sh", "-c", "exec shapewright serve --no-browser --host 0.0.0.0 --port 7860 --public \"$SPACE_HOST\" --frame-origin https://huggingface.co"]
