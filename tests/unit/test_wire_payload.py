"""The payload codec: what goes in comes out, and what cannot travel says where it is."""

from __future__ import annotations

import dataclasses
import datetime
import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagekeeper.v1.types_pb2 import Payload
from stagekeeper.wire import extensions
from stagekeeper.wire import payload as codec
from stagekeeper.wire.payload import JSON, MSGPACK, PayloadError, PayloadTooLarge
from stagekeeper.wire.tensors import ITEM_BYTES
from stagekeeper.wire.transport import MAX_PAYLOAD_BYTES

in_its_time = settings(deadline=None)  # a busy machine is no failure

_keys = st.text(max_size=8)
_json_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
_msgpack_scalars = _json_scalars | st.binary() | st.floats(allow_nan=False)


def _trees(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_keys, inner, max_size=4),
        max_leaves=12,
    )


_dtypes = sorted(set(ITEM_BYTES) - {"bfloat16"})
_arrays = st.builds(
    lambda name, shape, seed, order: _array(name, shape, seed, order),
    st.sampled_from(_dtypes),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(0, 2**16),
    st.sampled_from(["C", "F", "big", "strided"]),
)


def _array(name, shape, seed, order):
    count = math.prod(shape)
    raw = np.random.default_rng(seed).integers(0, 2 if name == "bool" else 100, count)
    array = raw.astype(name).reshape(shape)
    if order == "F":
        return np.asfortranarray(array)
    if order == "big":
        return array.astype(array.dtype.newbyteorder(">"))
    if order == "strided":
        return np.stack([array, array], axis=-1)[..., 0]
    return array


@in_its_time
@given(_trees(_json_scalars))
def test_json_round_trip_keeps_the_value(value):
    assert codec.decode(codec.encode(value, JSON)) == value


@in_its_time
@given(_trees(_msgpack_scalars))
def test_msgpack_round_trip_keeps_the_value(value):
    assert codec.decode(codec.encode(value, MSGPACK)) == value


@in_its_time
@given(
    st.lists(_trees(_msgpack_scalars), max_size=3),
    st.dictionaries(_keys, _trees(_msgpack_scalars), max_size=3),
)
def test_msgpack_arguments_round_trip_keeps_every_mix(args, kwargs):
    back = codec.decode_arguments(codec.encode_arguments(args, kwargs, MSGPACK))
    assert back == (tuple(args), kwargs)


@in_its_time
@given(st.dictionaries(_keys, _trees(_json_scalars), max_size=3))
def test_json_keywords_round_trip(kwargs):
    assert codec.decode_arguments(codec.encode_arguments((), kwargs, JSON)) == ((), kwargs)


@in_its_time
@given(_arrays)
def test_numpy_array_round_trip_keeps_dtype_shape_and_items(array):
    back = codec.decode(codec.encode({"deep": [1, (array,)]}))["deep"][1][0]
    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.shape == array.shape
    assert np.array_equal(back, array)
    assert not back.flags.writeable


@in_its_time
@given(_arrays)
def test_numpy_array_read_as_torch_holds_the_same(array):
    back = codec.decode(codec.encode(array), tensors="torch")
    assert str(back.dtype) == f"torch.{array.dtype.name}"
    assert tuple(back.shape) == array.shape
    assert back.tolist() == array.tolist()


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_torch_tensor_round_trip_keeps_dtype_shape_and_items(name, shape):
    tensor = torch.ones(shape).to(getattr(torch, name))
    back = codec.decode(codec.encode([tensor]), tensors="torch")[0]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_torch_tensor_with_gradient_views_and_conjugation_travels_by_value():
    tensor = torch.tensor([[1 + 2j, 3 - 4j]], requires_grad=True).conj().T
    back = codec.decode(codec.encode(tensor), tensors="torch")
    assert torch.equal(back, tensor.detach().resolve_conj())


@in_its_time
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=5))
def test_bfloat16_read_by_numpy_is_widened_exactly(values):
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    back = codec.decode(codec.encode(tensor))
    assert back.dtype == np.float32
    assert back.tolist() == tensor.float().tolist()


def test_decoded_array_shares_the_memory_of_the_message():
    data = codec.encode(np.arange(1000)).data
    back = codec.decode(Payload(content_type=MSGPACK, data=data))
    assert back.base is not None
    assert not back.flags.owndata


def test_scalars_of_numpy_travel_as_pythons_own():
    value = [np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("a"), np.float64(2)]
    assert codec.decode(codec.encode(value)) == [0.5, -3, True, "a", 2.0]
    assert codec.decode(codec.encode(value, JSON)) == [0.5, -3, True, "a", 2.0]


def test_tensor_in_json_becomes_nested_lists():
    value = {"a": np.eye(2), "t": torch.ones(2, dtype=torch.bfloat16)}
    assert codec.encode(value, JSON).text == '{"a":[[1.0,0.0],[0.0,1.0]],"t":[1.0,1.0]}'


def test_tuples_sets_dataclasses_and_times_arrive_as_documented():
    @dataclasses.dataclass
    class Point:
        x: int

    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert codec.decode(codec.encode([(1, 2), {3}, Point(4), now])) == [[1, 2], [3], {"x": 4}, now]


def test_dataclass_as_only_argument_is_positional_not_keywords():
    @dataclasses.dataclass
    class Point:
        x: int

    payload = codec.encode_arguments((Point(4),), {})
    assert codec.decode_arguments(payload) == (({"x": 4},), {})


# --- the contract, as another language would speak it


def test_contract_json_object_is_keywords():
    assert codec.decode_arguments(Payload(text='{"a": 1}')) == ((), {"a": 1})


@pytest.mark.parametrize("text", ["[1]", '"a"', "3", "null"])
def test_contract_json_anything_else_is_one_positional(text):
    expected = msgspec.json.decode(text)
    assert codec.decode_arguments(Payload(content_type=JSON, text=text)) == ((expected,), {})


def test_contract_msgpack_map_is_keywords_and_list_is_positional():
    assert codec.decode_arguments(Payload(data=b"\x81\xa1a\x01")) == ((), {"a": 1})
    assert codec.decode_arguments(Payload(data=b"\x91\x01")) == (([1],), {})


def test_contract_no_body_is_no_arguments_and_null():
    assert codec.decode_arguments(Payload()) == ((), {})
    assert codec.decode(Payload(content_type=MSGPACK)) is None


def test_contract_tensor_bytes_are_as_written_down():
    array = np.array([[1, 2]], dtype="<i2")
    inner = msgspec.msgpack.encode(["int16", [1, 2], b"\x01\x00\x02\x00"])
    assert codec.encode(array).data == msgspec.msgpack.encode(msgspec.msgpack.Ext(1, inner))


def test_bare_tensor_from_another_language_is_one_positional():
    inner = msgspec.msgpack.encode(["int16", [2], b"\x01\x00\x02\x00"])
    data = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, inner))
    (array,), kwargs = codec.decode_arguments(Payload(data=data))
    assert array.tolist() == [1, 2]
    assert kwargs == {}


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (Payload(), JSON),
        (Payload(text="1"), JSON),
        (Payload(data=b"\x01"), MSGPACK),
        (Payload(content_type=MSGPACK), MSGPACK),
    ],
)
def test_content_type_of_says_what_the_answer_is_encoded_in(payload, expected):
    assert codec.content_type_of(payload) == expected


# --- what is refused


@pytest.mark.parametrize(
    "payload",
    [
        Payload(content_type="application/x-pickle", data=b"\x80"),
        Payload(content_type="application/x-pickle"),
        Payload(content_type=JSON, data=b"1"),
        Payload(content_type=MSGPACK, text="1"),
        Payload(data=b""),
        Payload(data=b"\x92\x01"),
        Payload(data=b"\x01\x01"),
        Payload(data=b"\x81\x80\x01"),
        Payload(data=b"\xd4\x05a"),
        Payload(text="{"),
        Payload(text="[" * 100_000),
        Payload(data=b"\x91" * 100_000),
    ],
)
def test_malformed_payload_is_a_payload_error(payload):
    with pytest.raises(PayloadError):
        codec.decode(payload)
    with pytest.raises(PayloadError):
        codec.decode_arguments(payload)


@in_its_time
@given(st.binary(max_size=60))
def test_arbitrary_bytes_decode_or_are_a_payload_error(data):
    for decode in (codec.decode, codec.decode_arguments):
        try:
            decode(Payload(content_type=MSGPACK, data=data))
        except PayloadError:
            pass


@pytest.mark.parametrize(
    "content",
    [
        ["float99", [1], b"a"],
        ["int16", [2], b"abc"],
        ["int16", [-1, -1], b"ab"],
        ["int8", [1] * 100, b"a"],
        ["int8", [0, 2**62, 2**62], b""],
        ["int8"],
        7,
    ],
)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_malformed_tensor_is_a_payload_error(content, library):
    inner = msgspec.msgpack.encode(content)
    data = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, inner)])
    with pytest.raises(PayloadError, match="tensor"):
        codec.decode(Payload(data=data), tensors=library)


def test_argument_list_inside_a_value_is_refused():
    inner = msgspec.msgpack.Ext(2, msgspec.msgpack.encode([[], {}]))
    with pytest.raises(PayloadError, match="extension 2"):
        codec.decode_arguments(Payload(data=msgspec.msgpack.encode([inner])))
    with pytest.raises(PayloadError, match="extension 2"):
        codec.decode(Payload(data=msgspec.msgpack.encode(inner)))


def test_keywords_that_are_not_text_are_refused():
    with pytest.raises(PayloadError, match="not text"):
        codec.decode_arguments(Payload(data=b"\x81\x01\x02"))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, r"\$\['a'\]\[1\]\['b'\]"),
        ([0, 2**70], r"\$\[1\]"),
        (["\ud800"], r"\$\[0\]"),
        ({"t": torch.eye(2).to_sparse()}, r"\$\['t'\]: .*sparse"),
        ({"t": np.array([object()])}, r"\$\['t'\]: .*object"),
        (lambda: 0, r"\$: .*function"),
    ],
)
def test_value_that_cannot_travel_is_named_by_its_path(value, path):
    with pytest.raises(PayloadError, match=path):
        codec.encode(value)


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_value_that_cannot_travel_is_called_by_its_kind(content_type):
    with pytest.raises(PayloadError, match=r"^\$: an object cannot travel"):
        codec.encode(object(), content_type)
    with pytest.raises(PayloadError, match=r"^\$: a function cannot travel"):
        codec.encode(lambda: 0, content_type)


def test_value_that_holds_itself_is_refused():
    value: dict = {}
    value["again"] = [value]
    with pytest.raises(PayloadError, match="nested too deeply"):
        codec.encode(value)
    with pytest.raises(PayloadError, match="nested too deeply"):
        codec.encode(value, JSON)


def test_nesting_up_to_the_promised_depth_travels():
    value: object = 1
    for _ in range(codec.MAX_DEPTH):
        value = [value]
    assert codec.decode(codec.encode(value)) == value
    assert codec.decode(codec.encode(value, JSON)) == value


def test_too_large_payload_says_which_part_is_large():
    value = {"small": 1, "batch": [b"x", b"y" * (31 * 1024 * 1024)]}
    with pytest.raises(PayloadTooLarge, match=r"\$\['batch'\]\[1\]"):
        codec.encode(value)


def _payload_of(size: int, content_type: str) -> Payload:
    """Write one long value by hand, as a client of another make may send it."""
    if content_type == JSON:
        return Payload(content_type=JSON, text='"' + "x" * (size - 2) + '"')
    head = b"\xc6" + (size - 5).to_bytes(4, "big")  # bin 32
    return Payload(content_type=MSGPACK, data=head + bytes(size - 5))


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("read", [codec.decode, codec.decode_arguments])
def test_payload_above_the_limit_is_refused_whoever_made_it(content_type, read):
    assert read(_payload_of(MAX_PAYLOAD_BYTES, content_type))
    with pytest.raises(PayloadTooLarge, match="in parts"):
        read(_payload_of(MAX_PAYLOAD_BYTES + 1, content_type))


def test_json_refuses_a_mix_of_arguments_it_cannot_say():
    mixes: list[tuple[tuple, dict]] = [((1, 2), {}), ((1,), {"a": 1}), (({},), {})]
    for args, kwargs in mixes:
        with pytest.raises(PayloadError, match="MessagePack"):
            codec.encode_arguments(args, kwargs, JSON)


def test_codec_imports_neither_numpy_nor_torch():
    code = (
        "import sys; from stagekeeper.wire import payload as p; "
        "p.decode(p.encode({'a': [1, 'b']})); "
        "sys.exit(any(m in sys.modules for m in ('numpy', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("args", "kwargs", "place"),
    [
        ((object(),), {}, "batch"),
        (([1, object()],), {}, "batch[1]"),
        ((1, {"a": object()}), {}, "scale['a']"),
        ((1, 2, object()), {}, "argument 2"),
        ((1,), {"fast": [object()]}, "fast[0]"),
        ((), {"fast": object()}, "fast"),
        ((), {"odd name": object()}, "$[1]['odd name']"),
    ],
)
def test_argument_that_cannot_travel_is_named_as_its_caller_knows_it(args, kwargs, place):
    with pytest.raises(PayloadError) as caught:
        codec.encode_arguments(args, kwargs, names=("batch", "scale"))
    assert caught.value.place == place
    assert caught.value.problem == "an object cannot travel"
    assert str(caught.value) == f"{place}: an object cannot travel"


def test_argument_that_is_too_large_is_named():
    with pytest.raises(PayloadTooLarge, match=r"in batch\['x'\]: send it in parts") as caught:
        codec.encode_arguments(({"x": b"y" * (33 * 1024 * 1024)}, 1), {}, names=("batch",))
    assert caught.value.problem.startswith("it has 346030")
    assert caught.value.problem.endswith(f"and {MAX_PAYLOAD_BYTES} are allowed: send it in parts")


class Handle:
    """Stands for what another package registers."""

    def __init__(self, name: str) -> None:
        self.name = name


class NearHandle(Handle):
    pass


@pytest.fixture
def handles(monkeypatch):
    monkeypatch.setattr(extensions, "_by_code", {})

    def pack(handle: Handle) -> bytes:
        if not handle.name:
            raise ValueError("it has no name yet")
        return handle.name.encode()

    def unpack(data: bytes) -> Handle:
        return Handle({"known": "known"}[data.decode()])

    extensions.register_extension(3, Handle, pack, unpack)


def test_registered_class_travels_wherever_a_value_may_stand(handles):
    assert codec.decode(codec.encode(Handle("known"))).name == "known"
    assert codec.decode(codec.encode({"a": [NearHandle("known")]}))["a"][0].name == "known"
    for args, kwargs in [
        ((Handle("known"),), {}),
        ((1, Handle("known")), {}),
        ((), {"k": Handle("known")}),
    ]:
        got_args, got_kwargs = codec.decode_arguments(codec.encode_arguments(args, kwargs))
        assert [getattr(it, "name", it) for it in got_args] == [
            getattr(it, "name", it) for it in args
        ]
        assert {key: it.name for key, it in got_kwargs.items()} == dict.fromkeys(kwargs, "known")


def test_registered_value_that_cannot_be_packed_is_named(handles):
    with pytest.raises(PayloadError, match=r"^peer: it has no name yet$"):
        codec.encode_arguments((1, Handle("")), {}, names=("x", "peer"))


def test_registered_value_that_cannot_be_unpacked_is_a_payload_error(handles):
    data = msgspec.msgpack.encode([msgspec.msgpack.Ext(3, b"other")])
    with pytest.raises(PayloadError, match=r"extension 3 \(Handle\) does not decode"):
        codec.decode(Payload(data=data))


def test_registered_value_is_refused_as_json(handles):
    with pytest.raises(
        PayloadError, match=r"^\$\[0\]: a Handle cannot travel as JSON: use MessagePack"
    ):
        codec.encode([Handle("known")], JSON)


def test_extension_that_nobody_registered_is_an_error(handles):
    with pytest.raises(PayloadError, match="extension 4 is not known"):
        codec.decode(Payload(data=msgspec.msgpack.encode(msgspec.msgpack.Ext(4, b""))))


@pytest.mark.parametrize("code", [1, 2, -1, 128])
def test_code_that_is_not_free_for_others_is_refused(handles, code):
    with pytest.raises(ValueError, match="from 3 to 127"):
        extensions.register_extension(code, Handle, lambda _: b"", lambda _: Handle("known"))


def test_code_means_one_class(handles):
    with pytest.raises(ValueError, match="extension 3 is Handle already"):
        extensions.register_extension(3, NearHandle, lambda _: b"", lambda _: NearHandle("known"))
    extensions.register_extension(3, Handle, lambda _: b"", lambda _: Handle("again"))
    assert codec.decode(codec.encode(Handle("known"))).name == "again"
