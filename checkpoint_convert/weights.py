"""A model's weights in files of any format: which boxes they hold, and how to read them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from checkpoint_convert.formats import is_torch_dist
from checkpoint_convert.formats.hf_folder import check_weights
from checkpoint_convert.formats.tensor_io import StoredTensors, TensorSource
from checkpoint_convert.formats.torch_dist import read_chunks
from checkpoint_convert.megatron import checkpoint_layout
from checkpoint_convert.shape import ModelShape
from parallel import Layout, cover_exactly

_EMBEDDING = "embedding.word_embeddings.weight"
_TENSOR_SIZES = range(1, 65)


@dataclass(frozen=True)
class Weights:
    """A set of weights: all of a model, or the tensors that were requested."""

    shape: ModelShape
    layout: Layout
    """Which boxes of the Hugging Face tensors the stored tensors are."""
    tensors: TensorSource
    format: str
    """``safetensors``, ``bin`` or ``torch_dist``."""

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of every Hugging Face tensor. All its boxes share it, as they have the same key."""
        return {piece.tensor: self.tensors.dtypes[piece.local] for piece in self.layout.pieces}

    def close(self) -> None:
        """Close the files."""
        self.tensors.close()


def open_weights(path: Path, shape: ModelShape, names: Collection[str] | None = None) -> Weights:
    """The weights of a model of `shape` in a Hugging Face folder (safetensors or `.bin`) or a
    Megatron torch_dist checkpoint.

    Reads only headers, except for a tied model that also stores its head: then both tables are
    compared. Raises ValueError that lists all faults unless exactly the tensors of the model are
    there, each once and with its shape. `names` limits what is opened and checked in a Hugging Face
    folder to those tensors.
    """
    if is_torch_dist(path):
        return _open_torch_dist(path, shape)
    places = check_weights(path, shape, names)
    whole = Layout.of_whole_tensors({name: place.shape for name, place in places.items()})
    formats = {place.file.suffix.lstrip(".") for place in places.values()}
    return Weights(shape, whole, StoredTensors(places), " and ".join(sorted(formats)))


def _open_torch_dist(path: Path, shape: ModelShape) -> Weights:
    stored = read_chunks(path, keys=_is_model_key)
    stored.tensors.check_files()
    if _EMBEDDING not in stored.shapes:
        found = [*read_chunks(path).shapes, "nothing"][:3]
        raise ValueError(
            f"{path} is not a checkpoint of a Megatron-Core GPTModel: it has no {_EMBEDDING}, but "
            f"{', '.join(found)} ..."
        )
    wanted = checkpoint_layout(shape, _padded_vocab(path, shape, stored.shapes[_EMBEDDING][0]))
    faults = [
        f"{key} {list(size)} is missing"
        for key, size in wanted.shapes.items()
        if key not in stored.shapes
    ]
    for key, size in stored.shapes.items():
        if key not in wanted.shapes:
            faults.append(f"{key} {list(size)} is not part of the model")
        elif size != wanted.shapes[key]:
            faults.append(
                f"{key} has shape {list(size)}, the config requires {list(wanted.shapes[key])}"
            )
    if faults:
        raise ValueError(
            f"{path} is not a checkpoint of the {shape.family} model that its config describes:\n  "
            + "\n  ".join(faults)
        )
    try:
        cover_exactly(wanted.shapes, [stored.layout])
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return Weights(shape, stored.layout.through(wanted), stored.tensors, "torch_dist")


def _padded_vocab(path: Path, shape: ModelShape, num_rows: int) -> int:
    """Rows of the stored embedding; ValueError unless it is the vocabulary padded for some mesh.

    Megatron-LM pads to a multiple of 128 times the tensor parallel size, we to a multiple of that
    size.
    """
    units = [*_TENSOR_SIZES, *(128 * size for size in _TENSOR_SIZES)]
    possible = {-(-shape.vocab_size // unit) * unit for unit in units}
    if num_rows > shape.vocab_size and num_rows not in possible:
        raise ValueError(
            f"{path} has an embedding of {num_rows:,} rows, but the config says vocab_size "
            f"{shape.vocab_size:,}, which no mesh pads to that: were tokens added?"
        )
    return max(num_rows, shape.vocab_size)


def _is_model_key(key: str) -> bool:
    """Whether a tensor of a checkpoint is a model weight, not optimizer or trainer state."""
    return key.startswith(("embedding.", "decoder.", "output_layer."))
