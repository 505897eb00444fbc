"""Reads and writes torch's pickles without torch and without calling anything that they name.

Loading a pickle normally calls whatever it names. Here, every class and function that torch, its
distributed checkpoints and Megatron-Core write is replaced by an inert one that only records its
arguments, and everything else is refused. Writing puts names into a pickle without importing them.
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
"""Bytes per element of torch's dtypes, by name."""
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
"""Dtype of each of torch's typed storages, by name."""


class Inert:
    """Stands for an object of a pickle or the result of a call; keeps its arguments and state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any]):
    def __setstate__(self, state: Any) -> None:
        """Ignore attributes of an OrderedDict, such as the metadata of a state dict."""


_DCP = "torch.distributed.checkpoint"
_INERT = {
    f"{_DCP}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta"
    ),
    # Megatron-Core stores the save plans of all ranks in the metadata.
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
    """The content of a pickle. Objects are of `Inert` classes with the original class names; dtypes
    are their names.

    Raises UnpicklingError, or any other error that a malformed pickle provokes.
    """
    _check_memo(data)
    return _InertUnpickler(data, persistent_load).load()


def whole_numbers(values: Any) -> Shape:
    """Sizes from a pickle as a tuple; TypeError unless all are integers of at least 0."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{values!r} are not valid sizes")
    return tuple(values)


class _InertUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, persistent_load: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        if persistent_load is not None:
            self.persistent_load = persistent_load  # type: ignore[method-assign]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"its pickle requires {module}.{name}, which is not allowed"
            )
        return _ALLOWED[module, name]


_OPERATIONS = {operation.code.encode("latin-1"): operation for operation in pickletools.opcodes}
_REMEMBER = ("PUT", "LONG_BINPUT")  # BINPUT's index is a byte, MEMOIZE's the number before it
# A run of operations of fixed size: a million of them take 0.1 s.
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
    """Refuse a pickle with a memo index that is not less than its size in bytes.

    The unpickler allocates a list of that length: ten bytes could request any amount of memory.
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


# Writing. Objects are compared by identity: one that occurs twice is written once.


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
    """An object of a class, with its state (usually its attributes)."""

    of: Name
    state: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something stored outside the pickle, such as a tensor's storage."""

    id: Any


def dump(value: Any) -> bytes:
    """Pickle a value made of the classes above and Python's builtins, in protocol 2."""
    stream = io.BytesIO()
    _NamePickler(stream, protocol=2).dump(value)
    return stream.getvalue()


_PythonPickler: Any = pickle._Pickler  # typeshed declares only a part of it


class _NamePickler(_PythonPickler):
    """The standard library's Python pickler; the C pickler would import the names."""

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
