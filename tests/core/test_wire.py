"""What must hold of the wire: values come back bit for bit, and bytes from anyone give a value or a WireError."""

import _pickle
import contextlib
import json
import math
import pickle
import random
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Optional, TypeVar

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewlabel.core import wire
from fewlabel.core.errors import RunFailed
from fewlabel.core.wire import WireError, check_kind, check_like, header, pack, unpack

Tree = dict[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Leaf:
    tensor: Tensor
    text: str
    flag: bool
    nothing: None = None


@dataclass(frozen=True)
class Everything:
    constant: ClassVar[int] = 7
    leaf: Leaf
    whole: int
    real: float
    tree: Tree
    many: tuple[Leaf, ...]
    pair: tuple[int, tuple[float, str]]
    empty: tuple[()]
    by_number: dict[int, dict[str, bool]]
    maybe: Tree | None
    old_style: Optional[tuple[float, ...]]  # noqa: UP045
    maybes: tuple[int | None, ...]


@dataclass(frozen=True)
class Update:
    model: Tree
    count: int = 1
    loss: float = 0.5


@dataclass(frozen=True)
class Phantom(Generic[T]):
    count: int


@dataclass(frozen=True)
class Boxed(Generic[T]):
    content: T


@dataclass(frozen=True)
class Picky:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is negative")


@dataclass(frozen=True)
class Outer:
    picky: Picky


@dataclass(frozen=True)
class Chain:
    rest: "Chain | None"


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, type by type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return (math.isnan(a) and math.isnan(b)) or repr(a) == repr(b) if isinstance(a, float) else a == b


def is_a(kind: type, value: Any) -> bool:
    """The value is of its declared type all the way down, as far as packing it anew can tell."""
    return type(value) is kind and same(value, unpack(kind, pack(value)))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    count, width = math.prod(shape), torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        tensor = torch.randint(2, (count,), generator=generator).bool()
    else:  # every bit pattern, hence also NaNs, infinities and subnormals
        tensor = torch.randint(256, (count * width,), dtype=torch.uint8, generator=generator).view(dtype)
    tensor = tensor.reshape(shape)
    return tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor


int64 = st.integers(-(1 << 63), (1 << 63) - 1)
trees = st.dictionaries(st.text(max_size=5), tensors(), max_size=3)
leaves = st.builds(Leaf, tensors(), st.text(), st.booleans(), st.none())
everything = st.builds(
    Everything,
    leaf=leaves,
    whole=int64,
    real=st.floats(),
    tree=trees,
    many=st.lists(leaves, max_size=3).map(tuple),
    pair=st.tuples(int64, st.tuples(st.floats(), st.text())),
    empty=st.just(()),
    by_number=st.dictionaries(int64, st.dictionaries(st.text(max_size=5), st.booleans(), max_size=2), max_size=3),
    maybe=st.none() | trees,
    old_style=st.none() | st.lists(st.floats(), max_size=3).map(tuple),
    maybes=st.lists(st.none() | int64, max_size=3).map(tuple),
)


def sample() -> Everything:
    leaf = Leaf(torch.tensor([True, False]), 'ü"\\{[', True)
    return Everything(
        leaf, -3, 0.1, {"w": torch.randn(2, 3), "b": torch.zeros(0, 4, dtype=torch.float16)}, (leaf, leaf),
        (1, (2.0, "x")), (), {-1: {"a": True}, 5: {}}, {"w": torch.tensor(1.5)}, (1.0, math.inf), (None, 4),
    )  # fmt: skip


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(head: object, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else (head if isinstance(head, str) else json.dumps(head)).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_value(data: bytes, value: object) -> bytes:
    head, body = split(data)
    head["__metadata__"]["value"] = value if isinstance(value, str) else json.dumps(value)
    return join(head, body)


def value_of(data: bytes) -> Any:
    return json.loads(split(data)[0]["__metadata__"]["value"])


def refused(kind: Any, data: bytes, match: str, **options: Any) -> None:
    with pytest.raises(WireError, match=match) as caught:
        unpack(kind, data, **options)
    assert "\n" not in str(caught.value)


# Round trips


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(everything)
def test_every_value_comes_back_bit_for_bit(value: Everything) -> None:
    assert same(unpack(Everything, pack(value)), value)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(tensors())
def test_every_tensor_may_be_the_root(tensor: Tensor) -> None:
    assert same(unpack(Tensor, pack(tensor, Tensor)), tensor)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 3), (float, -0.0), (str, ""), (bool, True), (type(None), None), (None, None), (int | None, None),
        (tuple[int, ...], (1, 2)), (tuple[int, str], (1, "a")), (dict[int, float], {-5: 1.0}),
        (dict[str, int], {"": 0}), (Phantom, Phantom(3)), (Phantom[str], Phantom(3)),
        (tuple[Tree, ...], ({"a": torch.ones(2)}, {})),
    ],
)  # fmt: skip
def test_every_allowed_type_may_be_the_root(kind: Any, value: Any) -> None:
    check_kind(kind)
    assert same(unpack(kind, pack(value, kind)), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_every_dtype_and_shape_survives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    assert same(unpack(Update, pack(Update({"w": tensor}))).model["w"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(), torch.arange(9.0)[::2], torch.ones(1).expand(3, 3),
        torch.nn.Parameter(torch.ones(3)), torch.conj(torch.tensor([1 + 2j])).imag, torch.arange(9.0)[3:6],
    ],
)  # fmt: skip
def test_views_and_parameters_are_sent_as_plain_values(tensor: Tensor) -> None:
    back = unpack(Update, pack(Update({"w": tensor}))).model["w"]
    assert torch.equal(back, tensor.detach())
    assert back.is_contiguous()
    assert not back.requires_grad


def test_a_tensor_used_twice_is_sent_twice() -> None:
    one = torch.ones(2)
    back = unpack(Update, pack(Update({"a": one, "b": one}))).model
    back["a"].zero_()
    assert back["b"].tolist() == [1, 1]


def test_returned_tensors_are_writable_and_independent_of_the_data() -> None:
    data = bytearray(pack(Update({"a": torch.ones(3), "b": torch.ones(3)})))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = unpack(Update, memoryview(data))
    data[:] = bytes(len(data))
    update.model["a"].add_(1)
    assert update.model["a"].tolist() == [2, 2, 2]
    assert update.model["b"].tolist() == [1, 1, 1]


def test_equal_values_give_equal_bytes() -> None:
    value = sample()
    assert len({pack(value, header={"b": "1", "a": "2", "c": "3"}) for _ in range(20)}) == 1


def test_an_int_is_taken_where_a_float_is_declared_and_becomes_one() -> None:
    update = unpack(Update, pack(Update({}, loss=3)))
    assert type(update.loss) is float
    assert update.loss == 3.0
    assert type(unpack(float, with_value(pack(1.0), "7"))) is float
    assert type(unpack(float, pack(np.float64(0.1), float))) is float


def test_dict_order_is_kept() -> None:
    assert list(unpack(dict[int, int], pack({3: 0, 1: 0, 2: 0}, dict[int, int]))) == [3, 1, 2]


# The format


def test_safetensors_own_loader_reads_the_tensors_in_traversal_order(tmp_path: Any) -> None:
    data = pack(Update({"b": torch.arange(3), "a": torch.ones(2, 2, dtype=torch.bfloat16)}), header={"who": "me"})
    loaded = safetensors.torch.load(data)
    assert loaded["0"].tolist() == [0, 1, 2]
    assert loaded["1"].dtype is torch.bfloat16
    (tmp_path / "x").write_bytes(data)
    with safetensors.safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata().keys() == {"fewlabel", "value", "who"}
        assert json.loads(file.metadata()["value"]) == {"model": {"b": 0, "a": 1}, "count": 1, "loss": 0.5}
    assert int.from_bytes(data[:8], "little") % 8 == 0


def test_a_buffer_without_tensors_is_a_safetensors_file_too() -> None:
    data = pack(3, header={"a": "b"})
    assert safetensors.torch.load(data) == {}
    assert unpack(int, data) == 3


def test_the_header_comes_back_alone_and_no_tensor_is_read() -> None:
    data = pack(sample(), header={"round": "3", "ü": "\n"})
    assert header(data) == header(memoryview(data)) == {"round": "3", "ü": "\n"}
    length = 8 + int.from_bytes(data[:8], "little")
    assert header(data[:length]) == {"round": "3", "ü": "\n"}
    assert header(pack(3)) == {}


@pytest.mark.parametrize(
    "bad",
    [
        b"", b"\0" * 8, b"\xff" * 40, join("[]"), join("{}"), join({"__metadata__": {}}), join(b"\xff\xff"),
        join({"__metadata__": {"fewlabel": "1", "value": "3", "x": 3}}),
        join({"__metadata__": {"fewlabel": "2", "value": "3"}}),
    ],
)  # fmt: skip
def test_a_bad_header_is_a_wire_error(bad: bytes) -> None:
    with pytest.raises(WireError):
        header(bad)
    with pytest.raises(WireError):
        unpack(int, bad)


@pytest.mark.parametrize(
    "bad",
    [{"value": ""}, {"fewlabel": ""}, {"x": 3}, {3: "x"}, {"x": "\ud800"}, {"x": "y" * (wire.MAX_TEXT + 1)}],
)
def test_a_header_of_anything_but_free_names_and_texts_cannot_be_packed(bad: Any) -> None:
    with pytest.raises(WireError, match="header"):
        pack(3, header=bad)


def test_wire_uses_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(wire.__file__).read_text()
    assert not any(word in source for word in ("pickle", "torch.load", "torch.save", "marshal", "eval("))
    for module in (pickle, _pickle):
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            monkeypatch.setattr(module, name, None)
    value = sample()
    assert same(unpack(Everything, pack(value)), value)


def test_a_wire_error_is_a_failed_run() -> None:
    assert issubclass(WireError, RunFailed)


# Kinds


@dataclass
class Loose:
    a: int


@dataclass(frozen=True)
class Unset:
    a: int = field(init=False, default=1)


@dataclass(frozen=True)
class Unknown:
    a: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


def holder(kind: Any) -> type:
    return dataclass(frozen=True)(type("Holder", (), {"__annotations__": {"a": kind}}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (holder(list[int]), r"Holder\.a: list\[int\] cannot be sent; use tuple"),
        (holder(tuple[set[int], ...]), r"Holder\.a\[…\]: set\[int\] cannot be sent; use tuple"),
        (holder(np.ndarray), r"Holder\.a: ndarray cannot be sent; use Tensor"),
        (holder(int | str), r"Holder\.a: int \| str cannot be sent; use X \| None"),
        (holder(int | str | None), r"Holder\.a: .* cannot be sent"),
        (holder(dict[float, int]), r"Holder\.a: dict\[float, int\] cannot be sent; use str or int keys"),
        (holder(dict[bool, int]), r"Holder\.a: dict\[bool, int\] cannot be sent"),
        (holder(Any), r"Holder\.a: .*Any cannot be sent"),
        (holder(object), r"Holder\.a: object cannot be sent"),
        (holder(bytes), r"Holder\.a: bytes cannot be sent"),
        (holder(tuple), r"Holder\.a: tuple cannot be sent"),
        (holder(dict), r"Holder\.a: dict cannot be sent"),
        (holder(T), r"Holder\.a: ~T cannot be sent"),
        (holder(Loose), r"Holder\.a: Loose cannot be sent; make it frozen"),
        (holder(Boxed[int]), r"Holder\.a\.content: ~T cannot be sent"),
        (Unset, r"Unset\.a: a field with init=False cannot be sent"),
        (Unknown, r"Unknown: .*Nowhere"),
        (Chain, r"Chain\.rest: Chain cannot be sent; a type cannot contain itself"),
        (complex, r"complex: complex cannot be sent"),
    ],
)
def test_a_kind_that_cannot_be_sent_is_a_type_error_with_its_path(kind: Any, message: str) -> None:
    for call in (check_kind, lambda kind: pack(1, kind), lambda kind: unpack(kind, b"")):
        with pytest.raises(TypeError, match=message):
            call(kind)


def test_a_kind_nested_deeper_than_its_json_may_be_is_a_type_error() -> None:
    kind: Any = int
    for _ in range(wire.MAX_DEPTH):
        kind = tuple[kind, ...]
    check_kind(kind)
    with pytest.raises(TypeError, match="deeper"):
        check_kind(tuple[kind, ...])


def test_a_value_as_deep_as_a_kind_may_be_comes_back() -> None:
    kind: Any = int
    value: Any = 3
    for _ in range(wire.MAX_DEPTH):
        kind, value = tuple[kind, ...], (value,)
    assert unpack(kind, pack(value, kind)) == value


# Packing


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (Update({"fc.weight": np.ones(2)}), None, r"Update\.model\['fc.weight'\]: expected Tensor, found ndarray"),  # type: ignore[dict-item]
        (Update({3: torch.ones(2)}), None, r"Update\.model\[3\]: expected str, found int"),  # type: ignore[dict-item]
        (Update({}, count=True), None, r"Update\.count: expected int, found bool"),
        (Update({}, count=1.0), None, r"Update\.count: expected int, found float"),  # type: ignore[arg-type]
        (Update({}, count=1 << 63), None, r"Update\.count: the int does not fit in 64 bits"),
        (Update({}, loss=1 << 2000), None, r"Update\.loss: the int does not fit in 64 bits"),
        (Update({}, loss=True), None, r"Update\.loss: expected float, found bool"),
        (Update({}, loss=None), None, r"Update\.loss: expected float, found NoneType"),  # type: ignore[arg-type]
        (Update([]), None, r"Update\.model: expected dict, found list"),  # type: ignore[arg-type]
        (Update({"w": torch.ones(2).to_sparse()}), None, r"Update\.model\['w'\]: .* cannot be sent"),
        (Update({"w": torch.ones(2, device="meta")}), None, r"Update\.model\['w'\]: .*meta cannot be sent"),
        (Update({"w": torch.ones(2) * 1j}), None, r"Update\.model\['w'\]: .*complex64.* cannot be sent"),
        (((1, "a"), (2, 3)), tuple[tuple[int, str], ...], r"tuple\[1\]\[1\]: expected str, found int"),
        ((1, 2), tuple[int], "tuple: expected 1 items, found 2"),
        ([1], tuple[int, ...], "tuple: expected tuple, found list"),
        ({1: 1, True + 1: 2, "a": 3}, dict[int, int], r"dict\['a'\]: expected int, found str"),
        (Phantom("x"), None, r"Phantom\.count: expected int, found str"),
        ("x" * (wire.MAX_TEXT + 1), None, "str: it has 1048577 characters, more than 1048576"),
        ("\ud800", None, "str: .*surrogates"),
        (3, str, "str: expected str, found int"),
    ],
)  # fmt: skip
def test_a_pack_error_names_the_path(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(WireError, match="^" + message):
        pack(value, kind)


def test_a_subclass_is_refused_because_its_fields_would_be_lost() -> None:
    @dataclass(frozen=True)
    class More(Update):
        extra: int = 1

    with pytest.raises(WireError, match="expected Update, found More"):
        pack(More({}), Update)


def test_what_could_not_be_read_back_cannot_be_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TENSORS", 2)
    pack(Update({str(i): torch.ones(1) for i in range(2)}))
    with pytest.raises(WireError, match="3 tensors, more than 2"):
        pack(Update({str(i): torch.ones(1) for i in range(3)}))
    monkeypatch.setattr(wire, "MAX_HEADER", 500)
    with pytest.raises(WireError, match="bytes besides its tensors, more than 500"):
        pack("x" * 500)


# Unpacking: one rule each


def test_a_buffer_larger_than_allowed_is_refused() -> None:
    data = pack(Update({"w": torch.ones(100)}))
    unpack(Update, data, max_bytes=len(data))
    refused(Update, data, f"it has {len(data)} bytes, more than {len(data) - 1}", max_bytes=len(data) - 1)


def test_more_json_than_allowed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack("x" * 500)
    monkeypatch.setattr(wire, "MAX_HEADER", 500)
    refused(str, data, "bytes besides its tensors, more than 500")


def test_more_tensors_than_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(Update({str(i): torch.ones(1) for i in range(3)}))
    monkeypatch.setattr(wire, "MAX_TENSORS", 2)
    refused(Update, data, "3 tensors, more than 2")


@pytest.mark.parametrize("depth", [wire.MAX_DEPTH + 1, 500, 1_000_000])
def test_deep_json_is_refused(depth: int) -> None:
    for opening, closing in [("[", "]"), ('{"a":', "}")]:
        text = opening * depth + "0" + closing * depth
        refused(Update, with_value(pack(Update({})), text), "levels of JSON, more than 32")
        refused(Update, join(text), "levels of JSON, more than 32")
        refused(Update, join(opening * depth), "levels of JSON, more than 32")


def test_brackets_within_texts_are_not_depth() -> None:
    text = '[{"\\' * 1000
    assert unpack(str, pack(text, header={"a": text})) == text


def test_an_endless_string_of_quotes_is_refused_in_linear_time() -> None:
    start = time.perf_counter()
    refused(str, with_value(pack(""), "[" * 40 + '"' + '\\"' * 1_000_000), "levels of JSON")
    refused(str, with_value(pack(""), '"' + '\\"[' * 1_000_000), "failed with JSONDecodeError")
    assert time.perf_counter() - start < 3


def test_a_buffer_cut_short_is_refused() -> None:
    data = pack(Update({"w": torch.ones(3)}))
    for length in range(len(data)):
        refused(Update, data[:length], "Update: (the buffer is cut short|.*SafetensorError)")
    refused(Update, data[:7], "the buffer is cut short")
    refused(Update, data[:50], "the buffer is cut short")


def test_another_format_version_is_refused() -> None:
    head, body = split(pack(3))
    head["__metadata__"]["fewlabel"] = "2"
    refused(int, join(head, body), "the format version is '2', but only '1' can be read")
    del head["__metadata__"]["fewlabel"]
    refused(int, join(head, body), "the format version is None")


def test_a_foreign_safetensors_file_is_refused() -> None:
    refused(Tree, safetensors.torch.save({"a": torch.ones(2)}), "not one that fewlabel has packed")


def test_a_missing_field_is_refused() -> None:
    data = pack(Update({}))
    refused(Update, with_value(data, {"model": {}, "count": 1}), "^Update: the field 'loss' is missing")


def test_an_unknown_field_is_refused() -> None:
    data = pack(Update({}))
    value = {**value_of(data), "extra": 1}
    refused(Update, with_value(data, value), "^Update: the field 'extra' is unknown")


def test_duplicate_json_entries_are_refused() -> None:
    refused(dict[str, int], with_value(pack({}, dict[str, int]), '{"a":1,"a":1}'), "names an entry twice")
    refused(int, join('{"__metadata__":{"fewlabel":"1","value":"3","value":"3"}}'), "names an entry twice")
    refused(dict[int, int], with_value(pack({}, dict[int, int]), '{"1":1,"01":1}'), r"\['01'\]: the key is not an int")


@pytest.mark.parametrize("key", ["", "-", "-0", "+1", " 1", "1_0", "1.0", "٣", "9" * 19, "9" * 5000])
def test_only_the_one_spelling_of_an_int_is_a_key(key: str) -> None:
    refused(dict[int, int], with_value(pack({}, dict[int, int]), {key: 1}), "key is not an int|64 bits")


def test_a_tensor_used_twice_missing_or_unused_is_refused() -> None:
    data = pack(Update({"a": torch.ones(2), "b": torch.ones(2)}))
    for model, message in [
        ({"a": 0, "b": 0}, r"Update\.model\['b'\]: tensor 0 is missing or used twice"),
        ({"a": 0, "b": 2}, r"Update\.model\['b'\]: tensor 2 is missing or used twice"),
        ({"a": 0, "b": -1}, "tensor -1 is missing"),
        ({"a": 0, "b": True}, "expected int, found bool"),
        ({"a": 0, "b": "1"}, "expected int, found str"),
        ({"a": 0}, "tensor '1' belongs to no part of the value"),
    ]:
        refused(Update, with_value(data, {"model": model, "count": 1, "loss": 1.0}), message)


@pytest.mark.parametrize("dtype", ["U16", "U32", "U64", "C64", "F8_E4M3", "F99", "f32", ""])
def test_a_dtype_off_the_list_is_refused(dtype: str) -> None:
    head, body = split(pack(torch.ones(8, dtype=torch.uint8), Tensor))
    size = {"U16": 4, "U32": 2, "U64": 1, "C64": 1}.get(dtype, 8)
    head["0"] |= {"dtype": dtype, "shape": [size]}
    refused(Tensor, join(head, body), "are not accepted|SafetensorError")


def test_a_bool_tensor_of_other_bytes_is_refused() -> None:
    data = pack(torch.ones(2, dtype=torch.bool), Tensor)
    refused(Tensor, data[:-1] + b"\2", "neither 0 nor 1")


@pytest.mark.parametrize(
    "shape", [[0, 1 << 62, 1 << 62], [0, 1 << 63], [0, (1 << 64) - 1], [0, -1], [0] * 10_000, [3, 3], [0.0], "a"]
)
def test_an_impossible_shape_gives_an_empty_tensor_or_a_wire_error(shape: Any) -> None:
    head, body = split(pack(torch.ones(0), Tensor))
    head["0"]["shape"] = shape
    with contextlib.suppress(WireError):
        assert unpack(Tensor, join(head, body)).numel() == 0


@pytest.mark.parametrize("offsets", [[0, 4], [4, 8], [0, 12], [8, 0], [-8, 0], [0, 1 << 70]])
def test_offsets_outside_or_beside_the_data_are_refused(offsets: list[int]) -> None:
    head, body = split(pack(torch.ones(2), Tensor))
    head["0"]["data_offsets"] = offsets
    refused(Tensor, join(head, body), "SafetensorError")


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "true", "expected int, found bool"), (int, "1.0", "expected int, found float"),
        (int, str(1 << 63), "64 bits"), (int, "9" * 10_000, "int"), (float, str(1 << 70), "64 bits"),
        (float, "null", "expected float, found NoneType"),
        (bool, "1", "expected bool, found int"), (str, "1", "expected str, found int"),
        (type(None), "0", "expected NoneType"), (str, '"\\ud800"', "surrogates"),
        (str, json.dumps("x" * (wire.MAX_TEXT + 1)), "characters, more than"),
        (dict[str, int], json.dumps({"x" * (wire.MAX_TEXT + 1): 1}), "characters, more than"),
        (tuple[int, int], "[1]", "expected 2 items, found 1"), (tuple[int, ...], "{}", "expected list, found dict"),
        (tuple[int, ...], '[1,"2"]', r"tuple\[1\]: expected int, found str"),
        (Update, "[]", "expected dict, found list"),
        (int, "", "JSONDecodeError"), (int, "1 2", "JSONDecodeError"), (int, "\ufeff1", "JSONDecodeError"),
    ],
)  # fmt: skip
def test_json_of_another_type_is_refused(kind: Any, value: str, message: str) -> None:
    head = {"__metadata__": {"fewlabel": "1", "value": value}}
    refused(kind, join(head), message)


def test_a_class_that_refuses_its_values_gives_a_wire_error_with_the_path() -> None:
    data = with_value(pack(Outer(Picky(1))), {"picky": {"count": -1}})
    refused(Outer, data, r"^Outer\.picky: failed with ValueError 'count is negative'")


@pytest.mark.parametrize("error", [MemoryError, RecursionError, OverflowError, KeyError, RuntimeError])
def test_even_a_failure_of_the_machine_is_a_wire_error(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack(3)

    def fail(_: bytes) -> None:
        raise error("no")

    monkeypatch.setattr(wire.safetensors, "deserialize", fail)
    refused(int, data, error.__name__)


# Finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_refuses_a_nan_or_inf_and_names_the_path(bad: float) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        data = pack(Update({"w": torch.tensor([1.0, bad, 2.0], dtype=dtype)}))
        assert not unpack(Update, data).model["w"][1].isfinite()
        refused(Update, data, r"^Update\.model\['w'\]: expected finite values, found NaN or Inf", finite=True)
    data = pack(Update({}, loss=bad))
    assert repr(unpack(Update, data).loss) == repr(bad)
    refused(Update, data, r"^Update\.loss: expected a finite float, found", finite=True)


def test_finite_refuses_opposite_infinities() -> None:
    refused(Tensor, pack(torch.tensor([math.inf, -math.inf]), Tensor), "NaN or Inf", finite=True)


def test_finite_accepts_values_whose_sum_overflows_and_every_integer_tensor() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        unpack(Tensor, pack(torch.full((4,), torch.finfo(dtype).max, dtype=dtype), Tensor), finite=True)
    for dtype in DTYPES:
        unpack(Tensor, pack(torch.ones(4, dtype=dtype), Tensor), finite=True)
        unpack(Tensor, pack(torch.ones(0, dtype=dtype), Tensor), finite=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_sum_over_a_network_finds_what_a_look_at_each_tensor_does(bad: float) -> None:
    most = torch.finfo(torch.float32).max  # twice that is no float32, so the sum of both is Inf and each is not
    for _ in range(2):  # the second time the head is known
        unpack(Update, bytearray(pack(Update({"v": torch.tensor([most]), "w": torch.tensor([most])}))), finite=True)
        data = pack(Update({"v": torch.ones(1), "w": torch.tensor([bad])}))
        refused(Update, bytearray(data), r"^Update\.model\['w'\]: expected finite values", finite=True)


def test_finite_refuses_a_number_too_large_for_a_float() -> None:
    data = with_value(pack(1.0), "1e999")
    assert unpack(float, data) == math.inf
    refused(float, data, "finite", finite=True)


# Likeness


NETWORK = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict()


@dataclass(frozen=True)
class State:
    models: tuple[Tree, ...]
    moments: dict[str, Tree]
    centroids: Tree


def test_trees_that_fit_the_network_are_accepted_with_and_without_statistics() -> None:
    bare = {key: value for key, value in NETWORK.items() if "running" not in key and "num_batches" not in key}
    partly = {key: value for key, value in NETWORK.items() if "num_batches" not in key}
    check_like(State((NETWORK, bare, {}), {"m": partly}, {"class 1": torch.ones(7)}), NETWORK)
    check_like(NETWORK, NETWORK)
    check_like((1, "a", None, {"x": 1}, {1: torch.ones(1)}), NETWORK)


@pytest.mark.parametrize("tree", [{}, {"elsewhere.weight": torch.ones(2)}])
def test_what_is_called_a_model_is_one(tree: Tree) -> None:
    for upload in (Update(tree), Update(tree, loss=1.0)):
        with pytest.raises(WireError, match=r"^Update\.model\['0.weight'\]: expected .* found no such entry"):
            check_like(upload, NETWORK)


def test_a_variance_below_zero_is_refused() -> None:
    for value, fits in ((torch.tensor([0.0, 1.0]), True), (torch.tensor([1.0, -1e-3]), False)):
        with nullcontext() if fits else pytest.raises(WireError, match=r"\['1.running_var'\]: .* not below zero"):
            check_like(Update(NETWORK | {"1.running_var": value}), NETWORK)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": torch.ones(3, 2)}, r"\['0.weight'\]: expected torch.float32 \[2, 3\], found .*32 \[3, 2\]"),
        ({"0.bias": torch.ones(2).double()}, r"\['0.bias'\]: expected torch.float32 \[2\], found torch.float64 \[2\]"),
        ({"1.running_mean": torch.ones(1)}, r"\['1.running_mean'\]: expected torch.float32 \[2\], found .*32 \[1\]"),
        ({"1.num_batches_tracked": torch.ones(())}, r"\['1.num_batches_tracked'\]: expected torch.int64 \[\]"),
        ({"2.weight": torch.ones(1)}, r"\['2.weight'\]: expected no such entry, found torch.float32 \[1\]"),
        ({"0.bias": None}, r"\['0.bias'\]: expected torch.float32 \[2\], found no such entry"),
    ],
)  # fmt: skip
def test_a_tree_that_does_not_fit_the_network_is_refused_with_path_and_entry(change: Any, message: str) -> None:
    tree = {key: value for key, value in {**NETWORK, **change}.items() if value is not None}
    with pytest.raises(WireError, match=r"^State\.models\[1\]" + message):
        check_like(State((NETWORK, tree), {}, {}), NETWORK)
    with pytest.raises(WireError, match=r"^State\.moments\['m'\]" + message):
        check_like(State((), {"m": tree}, {}), NETWORK)


# Mutations


def junk(rng: random.Random) -> Any:
    deep: Any = 0
    for _ in range(rng.choice([1, 5, 40, 200])):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice(
        [None, True, 0, -1, 1 << 63, 1e400, math.nan, "", "\ud800", "x" * 99, [], {}, [0], {"a": 0}, deep]
    )


def spots(value: Any) -> list[tuple[Any, Any]]:
    found = []
    for key in range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else []:
        found += [(value, key), *spots(value[key])]
    return found


def swap(value: Any, rng: random.Random) -> Any:
    """One part of a JSON value replaced, removed, renamed or exchanged with another."""
    places = spots(value)
    if not places:
        return junk(rng)
    (owner, key), (other, name) = rng.choice(places), rng.choice(places)
    action = rng.randrange(4)
    if action == 0:
        owner[key] = junk(rng)
    elif action == 1:
        del owner[key]
    elif action == 2 and isinstance(owner, dict):
        owner[rng.choice(["", "0", "model", "__metadata__"])] = owner.pop(key)
    else:
        owner[key], other[name] = json.loads(json.dumps(other[name])), json.loads(json.dumps(owner[key]))
    return value


def mutate(data: bytes, rng: random.Random) -> bytes:
    raw = bytearray(data)
    action = rng.randrange(9)
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(raw)) if rng.random() < 0.3 else rng.randrange(8 + int.from_bytes(data[:8], "little"))
        if action == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            del raw[at:]
            raw = raw or bytearray(1)
        elif action == 2:
            raw[at:at] = rng.choice([rng.randbytes(rng.randrange(1, 9)), b"[" * 3000, b'"', b"\\", b"}", b'{"a":'])
        elif action == 3:
            del raw[at : at + rng.randrange(1, 9)]
    if action <= 3:
        return bytes(raw)
    head, body = split(data)
    if action == 4:
        return join(swap(head, rng), body)
    if action == 5:
        return with_value(data, swap(value_of(data), rng))
    if action == 6:
        text = bytearray(head["__metadata__"]["value"], "utf-8")
        text[rng.randrange(len(text))] = rng.randrange(128)
        return with_value(data, text.decode("utf-8", "replace"))
    if action == 7:
        return with_value(data, rng.choice(["[", '{"a":']) * rng.choice([10, 100, 5000]))
    return join(head, rng.randbytes(len(body) + rng.choice([-1, 0, 0, 1])) if body else b"x")


def outcome(kind: type, data: bytes, finite: bool) -> Any:
    try:
        return unpack(kind, data, finite=finite)
    except WireError as error:
        return error


@pytest.mark.parametrize("value", [sample(), Update({f"{i}.w": torch.randn(3) for i in range(12)}), Outer(Picky(3))])
def test_mutated_buffers_give_a_value_of_the_type_or_a_wire_error_and_nothing_else(value: Any) -> None:
    rng = random.Random(20)
    kind, data = type(value), pack(value, header={"round": "3"})
    read = 0
    for _ in range(1_500):
        mutant = mutate(data, rng)
        finite = rng.random() < 0.5
        start = time.perf_counter()
        back = outcome(kind, mutant, finite)
        if isinstance(back, WireError):
            assert "\n" not in str(back)
            assert len(str(back)) < 1000
        else:
            read += 1
            assert is_a(kind, back)
        with contextlib.suppress(WireError):
            assert all(type(text) is str for text in header(mutant).values())
        assert time.perf_counter() - start < 2
    assert 0 < read < 1_500


def test_random_bytes_are_a_wire_error() -> None:
    rng = random.Random(1)
    for _ in range(500):
        refused(Update, rng.randbytes(rng.randrange(200)), "Update")
        refused(Update, join(rng.randbytes(rng.randrange(200))), "Update")


def test_packing_what_was_unpacked_gives_the_same_bytes() -> None:
    data = pack(replace(sample(), whole=5))
    assert pack(unpack(Everything, data)) == data


def test_a_head_that_is_known_is_read_and_checked_like_a_new_one() -> None:
    for number in range(3):
        value = Update({"w": torch.full((2, 3), float(number)), "n": torch.tensor(number)})
        again = unpack(Update, bytearray(pack(value)))
        assert torch.equal(again.model["w"], value.model["w"])
        assert again.model["n"] == number
    bad = pack(Update({"w": torch.full((2, 3), math.nan), "n": torch.tensor(0)}))
    with pytest.raises(WireError, match="finite"):
        unpack(Update, bad, finite=True)
    data = pack(value)
    first, second = unpack(Update, data), unpack(Update, data)
    first.model["w"].zero_()
    assert torch.equal(second.model["w"], value.model["w"])


def test_tensors_lie_as_safetensors_would_lay_them() -> None:
    tensors = {str(i): torch.ones(i + 1).to(dtype) for i, dtype in enumerate([*wire._NAMES] * 2)}
    ours, theirs = pack(tuple(tensors.values()), tuple[Tensor, ...]), safetensors.torch.save(tensors)
    (head, body), (expected, bytes_) = split(ours), split(theirs)
    assert body == bytes_
    assert {name: entry for name, entry in head.items() if name != "__metadata__"} == expected
