"""Package metadata. Tool settings live in pyproject.toml; everything else is here."""

import pathlib

from setuptools import find_packages, setup

README = pathlib.Path(__file__).parent / "README.md"

setup(
    name="specjax",
    version="0.1.0",
    description="A JAX/Flax research framework for speculative decoding on TPU, GPU and CPU",
    long_description=README.read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["specjax", "specjax.*"]),
    install_requires=[
        "jax>=0.10,!=0.11.1",  # 0.11.1 rewrites the whole KV cache in every decode step on CPU
        "flax>=0.12.4",
        "numpy>=2.0",
        "optax>=0.2.6",
        "orbax-checkpoint>=0.11",
        "etils[epath]>=1.9",  # paths in buckets
        "ml_collections>=1.0",
        "array_record>=0.7",
        "absl-py>=2.1",
        "safetensors>=0.5",
        "gguf>=0.17",
        "transformers>=5.0",  # tokenizers and chat templates; no torch needed
        "tokenizers>=0.21",
        "jinja2>=3.1",
        "huggingface_hub>=1.0",
        "rich>=13.9",
        "matplotlib>=3.8",
        "grain>=0.2.18",  # shuffled, packed, resumable batches of training data
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda12]"],
        "test": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "nbclient>=0.10",
            "ipykernel>=6.29",
            "ruff>=0.9",
        ],
        "tensorboard": ["tensorboardX>=2.6"],
        "parity": ["torch>=2.4", "accelerate>=1.0"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
