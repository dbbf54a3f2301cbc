# docker build -t meshloom . && docker run --rm -it --gpus all --shm-size 8g meshloom   (without --gpus: on the CPU)
FROM python:3.11-slim-bookworm
# a compiler for DeepSpeed's operators on the host
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /meshloom
RUN pip install --no-cache-dir torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY meshloom meshloom
COPY trainer trainer
COPY launch launch
COPY ds_configs ds_configs
RUN pip install --no-cache-dir -e .
CMD ["deepspeed", "-q", "launch/train.py", "--config", "ds_configs/zero2.json"]
