"""Pickles of torch, read and written by the names in them, without torch and without a call.

To load a pickle is to call whatever it names. Here every class and function that torch, its
distributed checkpoints and Megatron-Core write is replaced by one that only keeps what it is given,
and everything else is refused. To write one, names are written that nobody imports.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from parallel import Shape

ITEM_SIZES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes per element of torch's dtypes, by their names."""
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
"""Torch's names of the storages that have a dtype."""


class Inert:
    """Stands for an object of a pickle, or for the result of a call: keeps what that was given."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        """Attributes of an OrderedDict, such as those of a state dict, are nobody's to read."""


_DCP = "torch.distributed.checkpoint"
_INERT = {
    f"{_DCP}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta"
    ),
    # Megatron-Core keeps the plans of all ranks with the metadata.
    f"{_DCP}.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",  # Python 3.13's name for the same
    "torch": "Tensor device",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": (
        "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
        "_rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_meta_tensor_no_storage"
    ),
    "torch.nn.parameter": "Parameter",
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (module, name): type(name, (Inert,), {})
        for module, names in _INERT.items()
        for name in names.split()
    },
    **{("torch", dtype): dtype for dtype in ITEM_SIZES},
    **{("torch", storage): dtype for storage, dtype in STORAGES.items()},
    ("torch.storage", "UntypedStorage"): "uint8",
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): _Dict,
}


def load(data: bytes, persistent_load: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle holds: `Inert` objects of classes of the names in it; dtypes are their names.

    Raises UnpicklingError, or whatever else a malformed pickle provokes.
    """
    _check_memo(data)
    return _InertUnpickler(data, persistent_load).load()


def whole_numbers(values: Any) -> Shape:
    """Sizes of a pickle; TypeError for what is none."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} are no sizes")
    return tuple(values)


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        if persistent_load is not None:
            self.persistent_load = persistent_load  # type: ignore[method-assign]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"its pickle asks for {module}.{name}")
        return _ALLOWED[module, name]


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_REMEMBER = ("PUT", "LONG_BINPUT")  # BINPUT's index is a byte, MEMOIZE's the number before it
# Operations in a row, as far as they have a fixed size: a million of them take 0.1 s.
_FIXED_SIZE = re.compile(
    b"(?:%s)*+"
    % b"|".join(
        re.escape(code) + b"." * (operation.arg.n if operation.arg else 0)
        for code, operation in _OPERATIONS.items()
        if operation.name not in ("STOP", *_REMEMBER)
        if operation.arg is None or operation.arg.n >= 0
    ),
    re.DOTALL,
)


def _check_memo(data: bytes) -> None:
    """Refuse a pickle that remembers something under an index that its size does not explain.

    The unpickler makes a list of that length: ten bytes could ask for any amount of memory.
    """
    stream = io.BytesIO(data)
    while True:
        stream.seek(_FIXED_SIZE.match(data, stream.tell()).end())  # type: ignore[union-attr]
        operation = _OPERATIONS[stream.read(1)]
        if operation.arg is None:  # the end
            return
        value = operation.arg.reader(stream)
        if operation.name in _REMEMBER and not 0 <= value < len(data):
            raise pickle.UnpicklingError(f"it remembers {value} things in {len(data)} bytes")


# Writing. The objects are compared by identity: one that occurs twice is written once.


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A class, a function or a dtype of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The result of a call."""

    function: Name
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """An object of a class, with its state: usually that is its attributes."""

    of: Name
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """What the reader finds elsewhere."""

    id: Any


def dump(value: Any) -> bytes:
    """The pickle of a value made of these and of what Python builds in, in protocol 2."""
    stream = io.BytesIO()
    _NamePickler(stream, protocol=2).dump(value)
    return stream.getvalue()


_PythonPickler: Any = pickle._Pickler  # typeshed knows a part of it


class _NamePickler(_PythonPickler):
    """The standard library's own pickler in Python, as that in C imports what it names."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, Persistent) else None

    def _save_name(self, obj: Name) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    def _save_call(self, obj: Call) -> None:
        self.save(obj.function)
        self.save(obj.arguments)
        self.write(pickle.REDUCE)
        self.memoize(obj)

    def _save_instance(self, obj: Instance) -> None:
        self.save(obj.of)
        self.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        if obj.state is not None:
            self.save(obj.state)
            self.write(pickle.BUILD)

    dispatch: ClassVar = _PythonPickler.dispatch | {
        Name: _save_name,
        Call: _save_call,
        Instance: _save_instance,
    }
