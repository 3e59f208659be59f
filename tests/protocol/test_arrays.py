"""Arrays go in and come out without a copy; what is no array is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from protocol.arrays import array_of, array_payload, tensor_of
from protocol.errors import InvalidRequest
from protocol.payloads import Payload, PayloadType

dtypes = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(),
    arrays.unsigned_integer_dtypes(),
    arrays.floating_dtypes(),
    arrays.complex_number_dtypes(),
)


@given(
    arrays.arrays(dtypes, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
)
def test_arrays_come_back_as_they_were(values: np.ndarray[Any, Any], turned: bool) -> None:
    values = values.T if turned else values
    payload = array_payload(PayloadType.LATENTS, values, step=3)
    back = array_of(payload)
    assert (back.dtype, back.shape) == (values.dtype, values.shape)
    assert back.tobytes() == values.tobytes()
    assert payload.attributes == {"step": 3}
    assert not back.flags.writeable


def test_contiguous_arrays_are_not_copied() -> None:
    values = np.arange(12.0).reshape(3, 4)
    assert np.shares_memory(array_of(array_payload(PayloadType.LATENTS, values)), values)
    assert not np.shares_memory(array_of(array_payload(PayloadType.LATENTS, values.T)), values)


class Tensor:
    """Lends its memory as tensors of other libraries do."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def test_what_lends_its_memory_is_not_copied() -> None:
    values = np.arange(6, dtype=np.float32)
    payload = array_payload(PayloadType.HIDDEN_STATES, Tensor(values))
    assert np.shares_memory(array_of(payload), values)


@pytest.mark.parametrize("values", [[1, 2], "text", object(), np.array([object()])])
def test_what_is_no_array_is_refused(values: object) -> None:
    with pytest.raises(InvalidRequest):
        array_payload(PayloadType.ACTIONS, values)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("<f4", (2,)), ("<f4", (-1,)), ("O", (1,)), ("", (8,)), ("bad", (8,))]
)
def test_a_payload_that_contradicts_itself_is_refused(dtype: str, shape: tuple[int]) -> None:
    with pytest.raises(InvalidRequest):
        array_of(Payload(PayloadType.ACTIONS, bytes(4), dtype, shape))


def test_brain_floats_come_as_their_bits() -> None:
    payload = Payload(PayloadType.HIDDEN_STATES, bytes([128, 63]), "bfloat16", (1,))
    assert array_of(payload).tolist() == [0x3F80]


def test_a_process_without_torch_does_not_get_it_through_here() -> None:
    script = (
        "import sys, protocol.arrays, protocol.shm_connector\n"
        "from protocol.payloads import Payload, PayloadType\n"
        "try:\n"
        "    protocol.arrays.tensor_of(Payload(PayloadType.ACTIONS, b'', '|u1', (0,)))\n"
        "except RuntimeError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert ran.stdout == "this process has not loaded torch False\n"


def test_cpu_tensors_go_in_and_come_out_without_a_copy() -> None:
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        tensor = torch.arange(12).to(dtype).reshape(3, 4)
        payload = array_payload(PayloadType.HIDDEN_STATES, tensor)
        back = tensor_of(payload)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.data_ptr() == tensor.data_ptr()
        assert torch.equal(back, tensor)
