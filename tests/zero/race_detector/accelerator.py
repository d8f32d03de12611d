"""Provide DeepSpeed with an asynchronous accelerator, whose streams and events record the order that they impose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.zero.race_detector.clocks import Clock
from tests.zero.race_detector.detector import DEFAULT_STREAM, Recorder
from tests.zero.race_detector.device_views import DeviceViews
from tests.zero.race_detector.storages import Place


class RecordedEvent:
    """A test double of ``torch.cuda.Event``. An event that was never recorded orders nothing."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._clock = Clock()

    def record(self, stream: RecordedStream | None = None) -> None:
        lane = self._recorder.stream if stream is None else stream.name
        # The event also covers everything that is ordered before this call on the host.
        self._recorder.order_after(lane, self._recorder.snapshot(self._recorder.host))
        self._clock = self._recorder.snapshot(lane)

    def wait(self, stream: RecordedStream | None = None) -> None:
        self._recorder.order_after(self._recorder.stream if stream is None else stream.name, self._clock)

    def synchronize(self) -> None:
        self._recorder.wait_on_host(self._clock)

    def query(self) -> bool:
        """Return False: a caller that only polls must be correct with that result."""
        return False

    def elapsed_time(self, end: RecordedEvent) -> float:
        return 1.0


class RecordedStream:
    """A test double of ``torch.cuda.Stream``."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        event = event or RecordedEvent(self._recorder)
        event.record(self)
        return event

    def wait_event(self, event: RecordedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: RecordedStream) -> None:
        self._recorder.order_after(self.name, self._recorder.snapshot(stream.name))

    def synchronize(self) -> None:
        self._recorder.wait_on_host(self._recorder.snapshot(self.name))


class RecordingAccelerator(CPU_Accelerator):
    """DeepSpeed's CPU accelerator with recorded streams and events.

    It also replaces ``torch.cuda`` in our own device, with ``Stream``, ``Event``, ``stream`` and ``current_stream``.
    """

    def __init__(self, recorder: Recorder, views: DeviceViews) -> None:
        super().__init__()
        self._recorder = recorder
        self._views = views
        self._numbers = count(1)
        self._streams: dict[str, RecordedStream] = {}

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return str(Place.ACCELERATOR.value)

    def current_device_name(self) -> str:
        return str(Place.ACCELERATOR.value)

    def is_fp16_supported(self) -> bool:
        # DeepSpeed's CPU accelerator returns False on some CPUs, but trains fp16 on all of them.
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return self._recorder.on_accelerator(tensor)

    def synchronize(self, device_index: Any = None) -> None:
        self._recorder.wait_on_host(self._recorder.snapshot_of_streams())

    # Streams and events

    @property
    def Stream(self) -> Callable[..., RecordedStream]:
        return lambda *_, **__: self._stream(f"stream {next(self._numbers)}")

    @property
    def Event(self) -> Callable[..., RecordedEvent]:
        return lambda *_, **__: RecordedEvent(self._recorder)

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        self._recorder.thread.streams.append(stream.name)
        try:
            yield
        finally:
            self._recorder.thread.streams.pop()

    def current_stream(self, device_index: Any = None) -> RecordedStream:
        return self._stream(self._recorder.stream)

    def default_stream(self, device_index: Any = None) -> RecordedStream:
        return self._stream(DEFAULT_STREAM)

    def _stream(self, name: str) -> RecordedStream:
        return self._streams.setdefault(name, RecordedStream(self._recorder, name))

    # Memory

    _torch_pins_host_memory = True

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """Return nothing, as PyTorch does before it uses a GPU."""
        return {}

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        return self._views.pin(tensor)

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return self._views.pin(torch.empty(shape, dtype=tensor.dtype))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._recorder.memory(tensor).pinned

    # Constructors of tensors from lists, as ``torch.cuda.FloatTensor`` is one

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return lambda data: torch.tensor(data, dtype=torch.float32, device=Place.ACCELERATOR.value)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return lambda data: torch.tensor(data, dtype=torch.uint8, device=Place.ACCELERATOR.value)
