"""The trace file: Chrome's trace event format, which Perfetto and chrome://tracing open as it is.

A device is a process, a stream a thread; a span is a complete event (`X`), a memory mark a counter event (`C`), and
`Trace.meta` stands under `otherData`. Times in the file are microseconds with three decimals, written and read as
decimals, so that every nanosecond survives the round trip.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from mixfleet.errors import InputError
from mixfleet.files import write_text
from mixfleet.trace import CATEGORIES, STREAMS, MemoryMark, Span, Trace

_MEMORY = "memory"


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)
    args: dict[str, Any] = {}


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    otherData: dict[str, Any] = {}


def dumps(trace: Trace) -> str:
    """The text of the trace file, one event a line."""
    threads = {name: i for i, name in enumerate(dict.fromkeys((*STREAMS, *(s.stream for s in trace.spans))))}
    names = trace.meta.get("device_names", {})
    events: list[str] = []
    for device in trace.devices:
        copies = trace.multiplicity(device)
        title = f"{device} {names.get(str(device), '')}".strip() + (f" (x {copies})" if copies > 1 else "")
        events.append(_line("M", "process_name", device, args={"name": title}))
        events.append(_line("M", "process_sort_index", device, args={"sort_index": device}))
    for device, stream in sorted({(s.device, s.stream) for s in trace.spans}, key=lambda x: (x[0], threads[x[1]])):
        events.append(_line("M", "thread_name", device, threads[stream], args={"name": stream}))
    for s in trace.spans:
        events.append(_line("X", s.name, s.device, threads[s.stream], s.category,
                            f',"ts":{_us(s.start_ns)},"dur":{_us(s.duration_ns)}'))
    for m in trace.memory:
        events.append(_line("C", _MEMORY, m.device, 0, m.what, f',"ts":{_us(m.time_ns)}', {"bytes": m.total_bytes}))
    lines = ",\n".join(events)
    return f'{{"traceEvents":[\n{lines}\n],\n"displayTimeUnit":"ms","otherData":{json.dumps(trace.meta)}}}\n'


def _line(ph: str, name: str, device: int, thread: int = 0, category: str = "", times: str = "",
          args: dict[str, Any] | None = None) -> str:
    cat = f',"cat":{json.dumps(category)}' if category else ""
    more = f',"args":{json.dumps(args)}' if args else ""
    return f'{{"ph":"{ph}","name":{json.dumps(name)}{cat},"pid":{device},"tid":{thread}{times}{more}}}'


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace file; a reader sees it whole or not at all."""
    write_text(path, dumps(trace))


def loads(text: str | bytes, where: str = "trace") -> Trace:
    """The trace in `text`. Tuples in `meta` come back as lists."""
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not a trace file: {error}", where=where) from None
    threads = {(e.pid, e.tid): str(e.args.get("name", e.tid)) for e in file.traceEvents
               if e.ph == "M" and e.name == "thread_name"}
    spans, memory = [], []
    for number, event in enumerate(file.traceEvents):
        if event.ph != "X" and (event.ph != "C" or event.name != _MEMORY):
            continue
        if not isinstance(event.pid, int):
            raise InputError(f"traceEvents[{number}].pid is {event.pid!r}; it must be the number of a device",
                             where=where)
        if event.ph == "C":
            held = event.args.get("bytes")
            if not isinstance(held, int):
                raise InputError(f"traceEvents[{number}].args.bytes is {held!r}, not a whole number", where=where)
            memory.append(MemoryMark(event.pid, _ns(event.ts), held, event.cat))
            continue
        if event.cat not in CATEGORIES:
            raise InputError(f"traceEvents[{number}].cat is {event.cat!r}; it must be one of {', '.join(CATEGORIES)}",
                             where=where)
        if event.dur < 0:
            raise InputError(f"traceEvents[{number}].dur is {event.dur}; it cannot be negative", where=where)
        stream = threads.get((event.pid, event.tid), str(event.tid))
        start = _ns(event.ts)
        spans.append(Span(event.pid, stream, event.name, event.cat, start, start + _ns(event.dur)))
    return Trace(spans=tuple(spans), memory=tuple(memory), meta=file.otherData)


def read_trace(path: str | Path) -> Trace:
    """Read a trace file. Raises InputError where it is no trace."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return loads(data, str(path))


def _ns(microseconds: Decimal) -> int:
    return round(microseconds * 1000)
