"""The trace file: Chrome's trace event format, which Perfetto and chrome://tracing open as it is.

A device is a process, a stream a thread; a span is a complete event (`X`), a memory mark a counter event (`C`), and
`Trace.meta` stands under `otherData`. Times in the file are microseconds with three decimals, so nanoseconds survive
the round trip exactly (up to 2**52 ns, 52 days).
"""

from __future__ import annotations

import json
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
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    otherData: dict[str, Any] = {}


def dumps(trace: Trace) -> str:
    """The text of the trace file, one event a line."""
    threads = {name: i for i, name in enumerate(dict.fromkeys((*STREAMS, *(s.stream for s in trace.spans))))}
    names = trace.meta.get("device_names", {})
    events: list[dict[str, Any]] = []
    for device in trace.devices:
        copies = trace.multiplicity(device)
        title = f"{device} {names.get(str(device), '')}".strip() + (f" (x {copies})" if copies > 1 else "")
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": {"name": title}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}})
        streams = {s.stream for s in trace.spans if s.device == device}
        events += [{"ph": "M", "name": "thread_name", "pid": device, "tid": tid, "args": {"name": name}}
                   for name, tid in threads.items() if name in streams]
    events += [{"ph": "X", "name": s.name, "cat": s.category, "pid": s.device, "tid": threads[s.stream],
                "ts": s.start_ns / 1000, "dur": s.duration_ns / 1000} for s in trace.spans]
    events += [{"ph": "C", "name": _MEMORY, "cat": m.what, "pid": m.device, "ts": m.time_ns / 1000,
                "args": {"bytes": m.total_bytes}} for m in trace.memory]
    lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in events)
    return f'{{"traceEvents":[\n{lines}\n],\n"displayTimeUnit":"ms","otherData":{json.dumps(trace.meta)}}}\n'


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


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
