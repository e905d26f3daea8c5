"""Memory of GPUs, with a GPU that this machine does not have."""

import torch

from fixtures.recorded_metrics import metric, metrics_page
from twinkle.nn import device_memory
from twinkle.telemetry import CudaMemory, gpu_memory, summed
from twinkle_services.kit.telemetry import measures


class FakeCuda:
    """The functions of `torch.cuda` for a GPU of 1000 bytes that two processes use."""

    def __init__(self, *, is_initialized: bool = True) -> None:
        self._is_initialized = is_initialized

    def is_initialized(self) -> bool:
        """Return whether the process has used the GPU."""
        return self._is_initialized

    def memory_allocated(self, device: str) -> int:
        """Return the bytes of this process's tensors; the second GPU has none."""
        return 300 if device == 'cuda:0' else 0

    def memory_reserved(self, device: str) -> int:
        """Return the bytes of this process."""
        return 400 if device == 'cuda:0' else 0

    def mem_get_info(self, device: str) -> tuple[int, int]:
        """Return free and total bytes."""
        assert self._is_initialized, f'reading {device} would allocate memory'
        return 350, 1000


def test_memory_of_a_gpu_includes_other_processes() -> None:
    """Allocated and reserved bytes are those of this process; used bytes are those of all processes."""
    cuda: CudaMemory = FakeCuda()
    first = gpu_memory(cuda, 'cuda:0')
    assert first == {'allocated': 300, 'reserved': 400, 'used': 650, 'total': 1000}
    assert summed([first, gpu_memory(cuda, 'cuda:1')]) == {
        'allocated': 300, 'reserved': 400, 'used': 1300, 'total': 2000,
    }  # fmt: skip
    assert summed([{}, {}]) == {}


def test_states_are_the_values_of_the_label() -> None:
    """Each state has its own series and is not counted as `_OTHER`."""
    with measures.device_memory.observing(lambda: gpu_memory(FakeCuda(), 'cuda:0')):
        states = {state: metric('twinkle_device_memory_bytes', state=state) for state in ('allocated', 'used', 'total')}
        assert 'twinkle_device_memory_bytes{state="_OTHER"}' not in metrics_page()
    assert states == {'allocated': 300, 'used': 650, 'total': 1000}


def test_a_gpu_that_the_process_has_not_used_is_not_read() -> None:
    """A CPU and an unused GPU have no values, because the first reading would allocate memory on the GPU."""
    assert gpu_memory(FakeCuda(is_initialized=False), 'cuda') == {}
    assert gpu_memory(FakeCuda(), 'cpu') == {}
    assert device_memory('cpu') == {}


def test_torch_has_the_functions_that_report_memory() -> None:
    """`torch.cuda` has every function of the protocol, even on a machine without a GPU."""
    for name in ('is_initialized', 'memory_allocated', 'memory_reserved', 'mem_get_info'):
        assert callable(getattr(torch.cuda, name))
