"""Plans how an import cuts a model into the chunks and files of a checkpoint. Reads no weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from checkpoint_convert.formats.safetensors_file import ITEM_SIZES
from checkpoint_convert.formats.torch_dist_writer import Chunk
from checkpoint_convert.megatron import checkpoint_boxes, checkpoint_layout, hf_tensors
from checkpoint_convert.shape import ModelShape, check_divisible, padded_vocab_size
from parallel import Box, Layout, ParallelDims, Piece, cover_exactly

# Megatron-Core and other loaders read chunks whole, so they should not be large.
MAX_CHUNK_BYTES = 64 << 20
FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class ImportPlan:
    """The chunks of a checkpoint, grouped by file, in the order of the tensors in the model."""

    files: list[list[Chunk]]
    layout: Layout
    """Which boxes of the Hugging Face tensors the chunks are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, including the padding of the vocabulary."""
        return sum(chunk.num_bytes for file in self.files for chunk in file)


def plan_import(shape: ModelShape, dims: ParallelDims, dtypes: Mapping[str, str]) -> ImportPlan:
    """Cut the model as the ranks of `dims` hold it, then into chunks of at most MAX_CHUNK_BYTES.

    `dtypes` maps the Hugging Face tensors to safetensors dtype names. Raises ValueError when `dims`
    cannot split the model, or when tensors that Megatron-Core stores as one differ in dtype.
    """
    check_divisible(shape, dims)
    whole = checkpoint_layout(shape, padded_vocab_size(shape, dims))
    key_dtypes = _key_dtypes(whole, dtypes)
    chunks = [
        Chunk(key, part, whole.shapes[key], key_dtypes[key])
        for owned in checkpoint_boxes(shape, dims)
        for key, box in owned
        for part in box.cut(MAX_CHUNK_BYTES // ITEM_SIZES[key_dtypes[key]])
    ]
    layout = Layout(
        {chunk.name: chunk.box.size for chunk in chunks},
        tuple(Piece(c.name, Box.whole(c.box.size), c.key, c.box) for c in chunks),
    ).through(whole)
    cover_exactly(hf_tensors(shape), [layout])
    return ImportPlan(list(_files(_in_reading_order(chunks, layout))), layout)


def _key_dtypes(whole: Layout, dtypes: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for piece in whole.pieces:
        dtype = dtypes[piece.tensor]
        if found.setdefault(piece.local, dtype) != dtype:
            raise ValueError(
                f"{piece.tensor} is {dtype}, but others that Megatron-Core stacks or fuses with it "
                f"are {found[piece.local]}: choose one with --dtype"
            )
    return found


def _in_reading_order(chunks: list[Chunk], layout: Layout) -> list[Chunk]:
    """Sort chunks so that those cut from one tensor, by any rank, are adjacent: it is read once.

    Parts of a matrix that is split by columns share the pages of a file.
    """
    number: dict[str, int] = {}
    first: dict[str, int] = {}
    for piece in layout.pieces:
        first.setdefault(piece.local, number.setdefault(piece.tensor, len(number)))
    return sorted(chunks, key=lambda chunk: first.get(chunk.name, -1))  # -1: only padding


def _files(chunks: list[Chunk]) -> Iterator[list[Chunk]]:
    file: list[Chunk] = []
    room = FILE_BYTES
    for chunk in chunks:
        if file and chunk.num_bytes > room:
            yield file
            file, room = [], FILE_BYTES
        file.append(chunk)
        room -= chunk.num_bytes
    yield file
