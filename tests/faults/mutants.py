# SPDX-License-Identifier: Apache-2.0
"""Break each promise of the module once, in a copy, and see a test fail.

    python tests/faults/mutants.py [NAME ...]

Prints, for each mutant, the tests that noticed it, and exits with 1 if one survived. Off-the-shelf
mutation tools patch the process that runs the tests; here most of the code under test runs in ranks
that are spawned from it.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MODULES = "modelopt/torch/utils"
UNIT = "tests/unit/torch/utils"
# Long enough for a mutant that waits; such a run counts as noticed.
TIMEOUT_SECONDS = 240.0


class Mutant(NamedTuple):
    """One line of the module, and what to break it into."""

    name: str
    tests: str
    line: str
    broken: str
    module: str = "distributed.py"


RUN, PLAN = f"{UNIT}/test_distributed_run.py", f"{UNIT}/test_distribution_plan.py"
TOGETHER, QUERIES = f"{UNIT}/test_failing_together.py", f"{UNIT}/test_queries.py"
SHARD, LOOP = f"{UNIT}/test_shard_dataloader.py", f"{UNIT}/test_forward_loop.py"
LOCK, FSDP2 = f"{UNIT}/test_file_lock.py", f"{UNIT}/test_fsdp2.py"
FAULT = "tests/faults/test_faults.py::test_fault_ends_the_job_in_time_and_is_shown"
LAUNCH = f"{FAULT}[raise-all_reduce-1of2] {FAULT}[raise-broadcast-1of2]"
BYTES, EXPERTS = f"{UNIT}/test_bytes_and_state_dicts.py", f"{UNIT}/test_expert_parallel.py"
ELSEWHERE = f"{TOGETHER} -k 'stays_away or last_seen or silent'"
EXPERT_PARALLEL, LOADER = "plugins/expert_parallel.py", "plugins/model_load_utils.py"
LOAD = f"{UNIT}/test_load_pretrained.py"

MUTANTS = [
    # Where am I
    Mutant("no-launch-check", QUERIES, "or 1) > 1", "or 1) > 2"),
    Mutant("launch-of-one", QUERIES, "or 1) > 1", "or 1) >= 1"),
    Mutant("run-of-one", QUERIES, "return size() > 1", "return is_initialized()"),
    Mutant("barrier-never", QUERIES, "if size(group) > 1:", "if False:"),
    Mutant("last-is-first", QUERIES, "== size(group) - 1", "== 0"),
    Mutant("group-timeout-of-torch", QUERIES, "timeout=_default_group_timeout(), ", ""),
    Mutant("no-RANK-fallback", QUERIES, 'else _whole_number_from_env("RANK") or 0', "else 0"),
    Mutant("unused-is-used", QUERIES, "self.group != -1 and is_initialized()", "is_initialized()"),
    Mutant("sync-first-group-only", QUERIES, "obj = op(values)", "return op(values)"),
    # The run
    Mutant("rank-and-size-swapped", RUN, "(rank(), size(), device)", "(size(), rank(), device)"),
    Mutant("device-by-global-rank", RUN, 'f"cuda:{local_rank()}"', 'f"cuda:{rank()}"'),
    Mutant("always-main", RUN, "return self.rank == 0", "return True"),
    Mutant("timeout-dropped", RUN, "setup(timeout=timeout)\n", "setup()\n"),
    Mutant("timeout-dropped-gloo", RUN, "setup(timeout=timeout, b", "setup(b"),
    Mutant(
        "timeout-dropped-in-setup", RUN, "GPU_RUN_BACKEND, timeout=timeout,", "GPU_RUN_BACKEND,"
    ),
    Mutant(
        "gloo-binds-a-device",
        RUN,
        "    if backend is None:\n        torch.cuda",
        "    if True:\n        torch.cuda",
    ),
    Mutant("no-device-bound", RUN, "        torch.cuda.set_device(local_rank())", "        pass"),
    Mutant(
        "device-bound-only-without-group",
        RUN,
        "    if backend is None:\n        torch.cuda",
        "    if backend is None and not is_initialized():\n        torch.cuda",
    ),
    Mutant(
        "group-set-up-twice",
        RUN,
        "    if not is_initialized():\n        torch.distributed.init",
        "    if True:\n        torch.distributed.init",
    ),
    Mutant("nccl-only", RUN, '"cpu:gloo,cuda:nccl"', '"nccl"'),
    Mutant("device-unchecked", RUN, "    if str(device) == wanted:", "    if True:"),
    Mutant(
        "setup-only-without-group",
        RUN,
        "    if is_launch and backend is None:\n        setup(timeout=timeout)",
        "    if is_launch and backend is None:\n        owns_group and setup(timeout=timeout)",
    ),
    Mutant(
        "presence-not-read-at-entry", RUN, "owns_group = not is_initialized()", "owns_group = True"
    ),
    Mutant(
        "group-left-behind", RUN, "if owns_group and not aborts:", "if is_launch and not aborts:"
    ),
    Mutant("never-torn-down", RUN, "            _tear_down()\n", "            pass\n"),
    Mutant(
        "raising-rank-cleans-up",
        RUN,
        "        aborts = owns_group and size() > 1",
        "        aborts = False",
    ),
    Mutant(
        "single-process-aborts",
        RUN,
        "        aborts = owns_group and size() > 1",
        "        aborts = owns_group",
    ),
    Mutant(
        "callers-group-aborts",
        RUN,
        "        aborts = owns_group and size() > 1",
        "        aborts = size() > 1",
    ),
    Mutant("exit-aborts", RUN, "except (SystemExit, GeneratorExit):", "except GeneratorExit:"),
    Mutant("close-aborts", RUN, "except (SystemExit, GeneratorExit):", "except SystemExit:"),
    Mutant("error-swallowed", RUN, "            abort()\n        raise\n", "            abort()\n"),
    Mutant("callers-group-destroyed", RUN, "if owns_group and not aborts:", "if not aborts:"),
    Mutant(
        "presence-read-after-set-up",
        RUN,
        "    aborts = False\n",
        "    aborts, owns_group = False, not is_initialized()\n",
    ),
    Mutant(
        "exit-reported",
        RUN,
        "    except (SystemExit, GeneratorExit):\n        raise\n",
        "    except (SystemExit, GeneratorExit) as error:\n        _report(error)\n        raise\n",
    ),
    Mutant("no-report", RUN, "        _report(error)\n", ""),
    Mutant(
        "report-after-abort",
        RUN,
        "        _report(error)\n        if aborts:\n            abort()\n",
        "        if aborts:\n            abort()\n            os._exit(9)\n        _report(error)\n",
    ),
    Mutant(
        "report-names-RANK",
        RUN,
        'f"rank {rank()} of {size()}"',
        "f\"rank {os.environ.get('RANK')} of {size()}\"",
    ),
    Mutant("report-on-two-lines", RUN, '" ".join(_describe(error).split())', "_describe(error)"),
    Mutant(
        "report-fails",
        RUN,
        "    with contextlib.suppress(Exception):\n        text",
        "    if True:\n        text",
    ),
    Mutant(
        "traceback-on-callers-path",
        RUN,
        "        _report(error)\n",
        "        _report(error)\n        traceback.print_exc()\n",
    ),
    Mutant(
        "body-error-from-exc-info", RUN, "            _tear_down()\n", "            cleanup()\n"
    ),
    Mutant("no-store-prefix", RUN, 'return {"store": prefixed', 'return {"store": store'),
    Mutant("connects-for-torchs-timeout", RUN, '"env://", timeout=timeout', '"env://"'),
    Mutant("same-store-prefix", RUN, 'f"modelopt/{uuid.uuid4()}", time', '"modelopt/run", time'),
    Mutant("same-question", RUN, 'question = f"modelopt/{uuid.uuid4()}"', 'question = "question"'),
    Mutant(
        "first-question-only",
        RUN,
        "                store.set(store.get(",
        "                store.check([f'heard {peer}']) or store.set(f'heard {peer}', '') or store.set(store.get(",
    ),
    Mutant("nobody-heard", RUN, "    while peers := [peer for", "    if peers := [peer for"),
    Mutant(
        "waits-for-peers-forever",
        RUN,
        "        if time.monotonic() > deadline:\n            raise RuntimeError",
        "        if False:\n            raise RuntimeError",
    ),
    Mutant(
        "no-answer-of-rank-0-bare",
        RUN,
        "    except torch.distributed.DistStoreError as error:",
        "    except ZeroDivisionError as error:",
    ),
    Mutant("rendezvous-required", RUN, "        return {}  #", "        pass  #"),
    Mutant(
        "cleanup-always-waits",
        RUN,
        "_tear_down(wait=error is None or isinstance(error, SystemExit))",
        "_tear_down()",
    ),
    Mutant(
        "cleanup-never-waits-on-exit",
        RUN,
        "_tear_down(wait=error is None or isinstance(error, SystemExit))",
        "_tear_down(wait=error is None)",
    ),
    Mutant(
        "barrier-error-escapes",
        RUN,
        "        with contextlib.suppress(Exception):\n            barrier()",
        "        if True:\n            barrier()",
    ),
    Mutant(
        "destroy-without-group",
        RUN,
        "    if not is_initialized():\n        return\n    if wait:",
        "    if wait:",
    ),
    Mutant(
        "abort-exits-on-exit",
        RUN,
        "    if isinstance(error, SystemExit):\n        raise error\n",
        "",
    ),
    Mutant("abort-silent", RUN, "            traceback.print_exc()\n", "            pass\n"),
    Mutant("abort-loses-buffers", RUN, "                stream.flush()", "                pass"),
    Mutant(
        "abort-unrecorded", RUN, "            _record_for_launcher(error)\n", "            pass\n"
    ),
    Mutant(
        "peers-not-let-first", LAUNCH, "            if _is_of_peer(error):", "            if False:"
    ),
    Mutant("bare-collectives-unseen", RUN, " or _is_of_transport(error):", ":"),
    Mutant("gloo-unseen", RUN, "    return is_of_gloo or isinstance", "    return isinstance"),
    Mutant(
        "torchs-errors-unseen",
        RUN,
        "    return is_of_gloo or isinstance(error, torch.distributed.DistError)",
        "    return is_of_gloo",
    ),
    Mutant("own-failure-waits", RUN, "            if _is_of_peer(error):", "            if True:"),
    Mutant(
        "only-direct-peer-errors",
        RUN,
        "        error = error.__cause__ or error.__context__ if error else None",
        "        error = None",
    ),
    Mutant(
        "abort-raises-instead", RUN, "        os._exit(exit_code)", "        sys.exit(exit_code)"
    ),
    Mutant("abort-exit-code-fixed", RUN, "        os._exit(exit_code)", "        os._exit(1)"),
    Mutant("unprintable-unrecorded", RUN, "(error, RuntimeError(_describe(error)))", "(error,)"),
    # The plan
    Mutant(
        "plan-on-the-root-only",
        PLAN,
        "    for _, module in modules:",
        "    for _, module in modules[:1]:",
    ),
    Mutant("second-record-allowed", PLAN, "        if recorded is not None:", "        if False:"),
    Mutant(
        "only-root-checked",
        PLAN,
        "    for name, module in modules:\n        recorded",
        "    for name, module in modules[:1]:\n        recorded",
    ),
    Mutant(
        "check-while-writing",
        PLAN,
        "        recorded = vars(module).get(_PLAN_ATTRIBUTE)",
        "        recorded = vars(module).get(_PLAN_ATTRIBUTE)\n        vars(module).setdefault(_PLAN_ATTRIBUTE, plan)",
    ),
    Mutant(
        "plan-in-state",
        PLAN,
        "        vars(module)[_PLAN_ATTRIBUTE] = plan",
        "        vars(module)[_PLAN_ATTRIBUTE] = plan\n        module.register_buffer('plan', torch.ones(1))",
    ),
    Mutant(
        "rank-count-check-dropped",
        PLAN,
        "    if is_distributed_run():\n        shown",
        "    if False:\n        shown",
    ),
    Mutant(
        "fsdp2-never-seen",
        PLAN,
        "    elif is_fsdp2_model(model) or is_dtensor_sharded(model):",
        "    elif is_dtensor_sharded(model):",
    ),
    Mutant(
        "dtensor-never-seen",
        PLAN,
        "    elif is_fsdp2_model(model) or is_dtensor_sharded(model):",
        "    elif is_fsdp2_model(model):",
    ),
    Mutant(
        "dtensor-buffers-unseen",
        PLAN,
        "[*model.parameters(), *model.buffers()]",
        "[*model.parameters()]",
    ),
    Mutant("bool-degree", PLAN, "if type(degree) is not int:", "if not isinstance(degree, int):"),
    Mutant("zero-degree", PLAN, "            if degree < 1:", "            if degree < 0:"),
    Mutant(
        "uneven-degree", PLAN, "        if self.world_size % self.ep_size:", "        if False:"
    ),
    Mutant(
        "any-dense",
        PLAN,
        '        if self.dense not in ("replicate", "fsdp"):',
        "        if False:",
    ),
    Mutant("edp-is-ep", PLAN, "return self.world_size // self.ep_size", "return self.ep_size"),
    # Collectives that fail together
    Mutant(
        "every-rank-runs-fn",
        TOGETHER,
        "_attempt(where, label, fn) if rank() == src else None",
        "_attempt(where, label, fn)",
    ),
    Mutant("always-from-rank-0", TOGETHER, "group_src=src)", "group_src=0)"),
    Mutant(
        "rank-range-unchecked",
        TOGETHER,
        '    if not 0 <= rank < size():\n        raise ValueError(\n            f"broadcast_from',
        '    if False:\n        raise ValueError(\n            f"broadcast_from',
    ),
    Mutant(
        "collective-in-one-process",
        TOGETHER,
        "    return is_distributed_run()\n\n\ndef _attempt",
        "    return is_initialized()\n\n\ndef _attempt",
    ),
    Mutant(
        "launch-without-group-allowed",
        TOGETHER,
        "    if not is_initialized() and is_distributed_launch():",
        "    if False:",
    ),
    Mutant(
        "raises-before-the-broadcast",
        TOGETHER,
        '    except BaseException as error:  # noqa: BLE001\n        return _Attempt(_Message(label, "error"',
        '    except ValueError:\n        raise\n    except BaseException as error:  # noqa: BLE001\n        return _Attempt(_Message(label, "error"',
    ),
    Mutant(
        "only-exceptions-carried",
        TOGETHER,
        "    except BaseException as error:  # noqa: BLE001\n        return _Attempt(",
        "    except Exception as error:  # noqa: BLE001\n        return _Attempt(",
    ),
    Mutant(
        "sent-error-ignored", TOGETHER, '        if message.kind == "error":', "        if False:"
    ),
    Mutant(
        "labels-ignored",
        TOGETHER,
        "    if any(message.label != label for",
        "    if False and any(message.label != label for",
    ),
    Mutant(
        "failures-before-labels",
        TOGETHER,
        "    _check_labels(where, label, messages)\n    _raise_peers_failure(where, messages, raised)",
        "    _raise_peers_failure(where, messages, raised)\n    _check_labels(where, label, messages)",
    ),
    Mutant(
        "own-value-uncombined",
        TOGETHER,
        "    return combine([_value_of(",
        "    return list([_value_of(",
    ),
    Mutant(
        "own-value-returned",
        TOGETHER,
        "    return combine([_value_of(",
        "    return own.value or list([_value_of(",
    ),
    Mutant(
        "raises-before-it-reads-the-others",
        TOGETHER,
        "    _sign_in(where)\n",
        "    if raised is not None:\n        raise raised\n",
    ),
    Mutant(
        "exit-is-an-error",
        TOGETHER,
        '_Message(label, "exit", _plain_exit_code(error.code))',
        '_Message(label, "error", _describe(error))',
    ),
    Mutant(
        "error-is-an-exit",
        TOGETHER,
        '_Message(label, "error", _describe(error))',
        '_Message(label, "exit", 1)',
    ),
    Mutant(
        "exit-code-dropped",
        TOGETHER,
        "            raise SystemExit(message.content)",
        "            raise SystemExit",
    ),
    Mutant("exits-ignored", TOGETHER, '        if message.kind == "exit":', "        if False:"),
    Mutant(
        "own-exit-beside-error",
        TOGETHER,
        "    for src, message in messages.items():\n        if message.kind",
        "    if raised is not None:\n        raise raised\n    for src, message in messages.items():\n        if message.kind",
    ),
    Mutant(
        "own-exit-before-broken",
        TOGETHER,
        "    if raised is not None and not isinstance(raised, SystemExit):\n        raise raised\n    if broken",
        "    if raised is not None:\n        raise raised\n    if broken",
    ),
    Mutant(
        "broken-before-own-error",
        TOGETHER,
        "    if raised is not None and not isinstance(raised, SystemExit):\n        raise raised\n    if broken is not None:",
        "    if broken is None and raised is not None and not isinstance(raised, SystemExit):\n        raise raised\n    if broken is not None:",
    ),
    Mutant(
        "broken-collective-unlabelled",
        TOGETHER,
        "    except Exception as error:  # noqa: BLE001 -- raised below",
        "    except ZeroDivisionError as error:  # noqa: BLE001 -- raised below",
    ),
    Mutant(
        "broken-unchained",
        TOGETHER,
        "from broken\n    _check_labels",
        "from None\n    _check_labels",
    ),
    Mutant(
        "float-exit-code",
        TOGETHER,
        "        return str(code)\n",
        "        return code  # type: ignore\n",
    ),
    Mutant("bool-exit-code", TOGETHER, "        return int(code)\n", "        return code\n"),
    Mutant("none-exit-code", TOGETHER, "    if code is None:\n        return None\n", ""),
    Mutant(
        "unprintable-error",
        TOGETHER,
        '    return "".join(traceback.format_exception_only(type(error), error)).strip()',
        '    return f"{type(error).__name__}: {error}"',
    ),
    Mutant(
        "serialised-twice",
        TOGETHER,
        "        return _saved(value, pickle_protocol=4).getvalue()",
        "        _saved(value)\n        return _saved(value, pickle_protocol=4).getvalue()",
    ),
    Mutant(
        "weights-only-values",
        TOGETHER,
        'map_location="cpu", weights_only=False',
        'map_location="cpu", weights_only=True',
    ),
    Mutant(
        "senders-device", TOGETHER, 'map_location="cpu", weights_only=False', "weights_only=False"
    ),
    Mutant("sender-gets-a-copy", TOGETHER, "own.value if own else _value_of", "_value_of"),
    Mutant(
        "load-error-bare",
        TOGETHER,
        '    except Exception as error:\n        raise RuntimeError(\n            f"{where}: the value',
        '    except ZeroDivisionError as error:\n        raise RuntimeError(\n            f"{where}: the value',
    ),
    Mutant("plain-values-saved", TOGETHER, "        if _is_plain(value):", "        if False:"),
    Mutant("all-values-plain", TOGETHER, "        if _is_plain(value):", "        if True:"),
    Mutant(
        "subclasses-plain",
        TOGETHER,
        "    kind = type(value)\n",
        "    kind = str if isinstance(value, str) else type(value)\n",
    ),
    Mutant("plain-at-any-depth", TOGETHER, "or depth == 0 or", "or"),
    Mutant("plain-at-any-length", TOGETHER, "or len(value) > _PLAIN_ITEMS", ""),
    Mutant(
        "bytes-as-text",
        TOGETHER,
        "_saved(value, pickle_protocol=4).getvalue()",
        "_saved(value).getvalue()",
    ),
    # Where the peers of a rank that waits are
    Mutant("nobody-signs-in", ELSEWHERE, "    _sign_in(where)\n", ""),
    Mutant("calls-uncounted", ELSEWHERE, "        board.calls += 1\n", ""),
    Mutant(
        "own-rank-is-elsewhere",
        ELSEWHERE,
        "                if seen != board.own_note:",
        "                if True:",
    ),
    Mutant("absent-from-the-start-is-here", ELSEWHERE, 'else "nowhere"', "else board.own_note"),
    Mutant(
        "lost-store-breaks-a-collective",
        ELSEWHERE,
        "    with contextlib.suppress(Exception):\n        board = _board()\n        board.calls",
        "    if True:\n        board = _board()\n        board.calls",
    ),
    Mutant("silent-store-holds-up", ELSEWHERE, "reader.join(_BOARD_SECONDS)", "reader.join()"),
    Mutant(
        "any-store-is-written",
        ELSEWHERE,
        "is_quick = isinstance(root, torch.distributed.TCPStore)",
        "is_quick = True",
    ),
    # The older object helpers
    Mutant(
        "broadcast-returns-own",
        BYTES,
        "values[0] if is_src else _load_payload(where, memory, src)",
        "fn()",
    ),
    Mutant(
        "broadcast-from-group-rank",
        BYTES,
        "    sender = _members(group).index(src)\n",
        "    sender = 0\n",
    ),
    Mutant(
        "src-unchecked-alone",
        BYTES,
        '    lengths = _meet(where, own, group, "src", src)\n',
        '    lengths = _meet(where, own, group, "src", src) if size(group) > 1 else [0]\n',
    ),
    Mutant(
        "allgather-loads-own", BYTES, "        obj if src == rank() else _load", "        _load"
    ),
    Mutant("any-reduction", BYTES, '    if reduction != "sum":', "    if False:"),
    Mutant(
        "master-runs-everywhere",
        BYTES,
        "func(*args, **kwargs) if is_master() else None",
        "func(*args, **kwargs)",
    ),
    # Bytes, tensors and state dicts
    Mutant(
        "dst-is-a-group-rank",
        BYTES,
        "        if rank() == dst:\n",
        "        if rank(group) == dst:\n",
    ),
    Mutant(
        "chunks-off-by-one",
        BYTES,
        "view[start : start + chunk_bytes]",
        "view[start : start + chunk_bytes - 1]",
    ),
    Mutant(
        "one-chunk", BYTES, "range(0, len(view), chunk_bytes)", "range(0, len(view), len(view))"
    ),
    Mutant(
        "chunk-ignored-by-sender",
        BYTES,
        "_chunks(own.memory, chunk_bytes)",
        "_chunks(own.memory, _CHUNK_BYTES)",
    ),
    Mutant(
        "own-bytes-shared",
        BYTES,
        "[bytearray(own.memory) if memory is None",
        "[data if memory is None",
    ),
    Mutant(
        "sender-copies",
        BYTES,
        '        return memoryview(data).cast("B")',
        '        return memoryview(bytes(data)).cast("B")',
    ),
    Mutant(
        "dst-copies",
        BYTES,
        "is None else memory for memory in gathered]\n\n\ndef",
        "is None else bytearray(bytes(memory)) for memory in gathered]\n\n\ndef",
    ),
    Mutant(
        "peers-payload-unpickled",
        BYTES,
        'map_location="cpu", weights_only=True',
        'map_location="cpu", weights_only=False',
    ),
    Mutant(
        "weights-only-by-default",
        BYTES,
        'map_location="cpu", weights_only=True',
        'map_location="cpu"',
    ),
    Mutant(
        "gathers-when-iterated",
        BYTES,
        "    own = _parcel(lambda: _saved_state(state))\n",
        "    yield from ()\n    own = _parcel(lambda: _saved_state(state))\n",
    ),
    Mutant(
        "payloads-kept",
        BYTES,
        "yield _load_payload(where, payloads.pop(), src)",
        "yield _load_payload(where, payloads[members[::-1].index(src)], src)",
    ),
    Mutant(
        "memory-file-copies",
        BYTES,
        "self._memory = memoryview(memory)",
        "self._memory = memoryview(bytes(memory))",
    ),
    Mutant(
        "own-error-not-exchanged",
        BYTES,
        '        return _Parcel(memoryview(b""), error)',
        "        raise",
    ),
    Mutant("peers-error-ignored", BYTES, "        if header.problem:", "        if False:"),
    Mutant(
        "disagreement-ignored",
        BYTES,
        "    if len({header[1:] for header in headers}) > 1:",
        "    if False:",
    ),
    Mutant("endpoint-unchecked", BYTES, "    if endpoint not in members:", "    if False:"),
    Mutant("chunk-unchecked", BYTES, "    if chunk_bytes < 1:", "    if False:"),
    Mutant("outsiders-allowed", BYTES, "    if rank(group) < 0:", "    if False:"),
    Mutant("header-does-not-fit", BYTES, "(numbers + text)[:_HEADER_BYTES]", "(numbers + text)"),
    Mutant(
        "bad-numbers-strand",
        BYTES,
        "        except struct.error:",
        "        except ZeroDivisionError:",
    ),
    Mutant(
        "broken-gather-bare",
        BYTES,
        "        raise _broken(where, broken) from broken\n    _check_headers",
        "        raise broken\n    _check_headers",
    ),
    Mutant(
        "tensors-not-as-bytes",
        BYTES,
        "flat = tensor.reshape(-1).view(torch.uint8)",
        "flat = tensor.reshape(-1)",
    ),
    Mutant(
        "state-off-device",
        BYTES,
        "tensor = torch.empty(shape, dtype=dtype, device=device)",
        "tensor = torch.empty(shape, dtype=dtype)",
    ),
    Mutant(
        "any-layout",
        BYTES,
        "        if not is_dense or tensor.is_meta",
        "        if tensor.is_meta",
    ),
    Mutant("meta-allowed", BYTES, "if not is_dense or tensor.is_meta or", "if not is_dense or"),
    Mutant(
        "device-memory-always",
        BYTES,
        '    if f"{device.type}:" in backend_config:\n        return device\n',
        "",
    ),
    Mutant(
        "staged-part-lost",
        BYTES,
        "    if buffer is not tensor:\n        tensor.copy_(buffer)",
        "    pass",
    ),
    # FSDP2
    Mutant(
        "root-always",
        FSDP2,
        "[*layers, model] if shard_root else layers",
        "[*layers, model]",
        "fsdp2_utils.py",
    ),
    Mutant(
        "root-never",
        FSDP2,
        "[*layers, model] if shard_root else layers",
        "layers",
        "fsdp2_utils.py",
    ),
    Mutant(
        "layers-not-wrapped",
        FSDP2,
        "[*layers, model] if shard_root else layers",
        "[model]",
        "fsdp2_utils.py",
    ),
    Mutant(
        "stays-gathered",
        FSDP2,
        '"reshard_after_forward": True',
        '"reshard_after_forward": False',
        "fsdp2_utils.py",
    ),
    Mutant(
        "precision-dropped",
        FSDP2,
        "mp_policy or MixedPrecisionPolicy()",
        "MixedPrecisionPolicy()",
        "fsdp2_utils.py",
    ),
    Mutant(
        "other-dtypes-sharded",
        FSDP2,
        "return others | of_experts",
        "return of_experts",
        "fsdp2_utils.py",
    ),
    Mutant(
        "warns-everywhere",
        FSDP2,
        "    if others and is_master():",
        "    if others:",
        "fsdp2_utils.py",
    ),
    Mutant("dominant-by-count", FSDP2, "+= parameter.numel()", "+= 1", "fsdp2_utils.py"),
    Mutant(
        "group-unchecked", FSDP2, "    if not is_initialized():", "    if False:", "fsdp2_utils.py"
    ),
    Mutant(
        "any-list",
        FSDP2,
        "    return matching[0] if len(matching) == 1 else None",
        "    return matching[0] if matching else None",
        "fsdp2_utils.py",
    ),
    Mutant(
        "only-layers",
        FSDP2,
        "            layers = _list_as_long_as_the_config_says(decoder)\n",
        "            layers = None\n",
        "fsdp2_utils.py",
    ),
    Mutant(
        "architectures-changed",
        FSDP2,
        "        config.architectures = architectures\n",
        "        config.architectures = [type(model).__name__]\n",
        "fsdp2_utils.py",
    ),
    # Expert parallelism
    *(
        Mutant(name, EXPERTS, line, broken, EXPERT_PARALLEL)
        for name, line, broken in [
            ("plan-for-other-ranks", "    if plan.world_size != live:", "    if False:"),
            ("mesh-transposed", "(plan.edp, plan.ep_size)", "(plan.ep_size, plan.edp)"),
            ("mesh-names-swapped", '("edp", "ep"))', '("ep", "edp"))'),
            ("uneven-share", "    if num_experts % degree:", "    if False:"),
            (
                "share-of-another-rank",
                "[place * num_experts // degree :]",
                "[(place + 1) % degree * num_experts // degree :]",
            ),
            ("looks-routed-never", "    return is_list or (", "    return False and ("),
            ("lists-allowed", "    return is_list or (", "    return ("),
            (
                "any-list-refused",
                'is_container and f".{name}".endswith(".experts")',
                "is_container",
            ),
            ("shared-refused", ' and "SharedExperts" not in kind)', ")"),
            ("known-hides-unknown", "parts.isdisjoint(module.modules())", "not found"),
            (
                "parts-refused",
                " and parts.isdisjoint(module.modules())",
                " and module not in found.values()",
            ),
            ("none-allowed", "    if not found:", "    if False:"),
            (
                "record-unread",
                "    if _TOTAL_ATTRIBUTE in vars(module):\n        return True\n",
                "",
            ),
            ("one-stack-is-enough", "len(stacks) < 2", "len(stacks) < 1"),
            ("uneven-stacks", " or len(counts) != 1", ""),
            ("counted-otherwise", " or total % counts.pop()", ""),
            ("called-otherwise", "    return len(arguments) > 3 or", "    return True or"),
            (
                "biases-whole",
                "if tensor.dim() and tensor.shape",
                "if tensor.dim() > 2 and tensor.shape",
            ),
            ("cut-twice", "        if held == len(share) * ep_mesh.size():", "        if True:"),
            ("never-cut", "        if held == len(share) * ep_mesh.size():", "        if False:"),
            ("a-view-is-kept", "[share.start : share.stop].clone()", "[share.start : share.stop]"),
            ("held-unchecked", "        if held != len(share):", "        if False:"),
            (
                "cut-before-checked",
                "    _, shares = _shares(model, ep_mesh)\n    for module, share, held in shares:\n",
                "    for module in routed_experts(model).values():\n        [(_, share, held)] = _shares(module, ep_mesh)[1]\n",
            ),
            (
                "total-overwritten",
                "vars(module).setdefault(_TOTAL_ATTRIBUTE, module.num_experts)",
                "vars(module)[_TOTAL_ATTRIBUTE] = module.num_experts",
            ),
            (
                "num-experts-left-whole",
                "module.num_experts, module._parallel_state, module._rows_seen = len(share), state",
                "module._parallel_state, module._rows_seen = state",
            ),
            (
                "no-parallel-state",
                "module.num_experts, module._parallel_state, module._rows_seen = len(share), state",
                "module.num_experts, module._rows_seen = len(share)",
            ),
            (
                "dispatches-twice",
                "if _dispatch not in module._forward_pre_hooks.values():",
                "if True:",
            ),
            ("combines-twice", "if _combine not in module._forward_hooks.values():", "if True:"),
            ("combines-last", "(_combine, prepend=True)", "(_combine)"),
            ("fsdp2-experts-cut", "        if is_dtensor_sharded(module):", "        if False:"),
            (
                "any-mesh",
                "    if ep_mesh.shape != (size(),) if edp_mesh is None else",
                "    if False if edp_mesh is None else False and",
            ),
            ("replicas-of-one", "is None or edp_mesh.size() == 1 else", "is None else"),
            (
                "groups-swapped",
                "ParallelState(edp_group, expert_model_parallel_group=ep_mesh.get_group())",
                "ParallelState(ep_mesh.get_group(), expert_model_parallel_group=edp_group)",
            ),
            ("keywords-dropped", "*args, *(kwargs[name] for name in names[len(args) :])", "args"),
            ("ids-not-mapped", "    index = index - group.rank() * held\n", ""),
            ("peers-pairs-kept", "(index >= 0) & (index < held)", "index < held"),
            ("past-the-last-kept", "(index >= 0) & (index < held)", "index >= 0"),
            ("weights-lost", "weights[mine][:, None])", "torch.ones_like(weights[mine])[:, None])"),
            (
                "empty-batch-stays-away",
                "    ranks, held = group.world_size(), module.num_experts\n",
                "    ranks, held = group.world_size(), module.num_experts\n    if not len(tokens):\n        return None\n",
            ),
            ("one-slot-only", "by_slot.sum(dim=1)", "by_slot[:, 0]"),
            ("one-rank-only", "    return by_rank.sum(dim=0)", "    return by_rank[group.rank()]"),
            (
                "way-back-swapped",
                "by_slot.sum(dim=1), received, sent,",
                "by_slot.sum(dim=1), sent, received,",
            ),
            ("splits-swapped", "(buffer, data, received, sent,", "(buffer, data, sent, received,"),
            ("rows-not-as-bytes", "rows.contiguous().view(torch.uint8)", "rows.contiguous()"),
            ("rows-across", "rows.contiguous().view", "rows.view"),
        ]
    ),
    Mutant(
        "forwards-not-installed-again",
        EXPERTS,
        "            install_expert_parallel_forwards(model, ep_mesh)\n",
        "            pass\n",
    ),
    # Calibration
    Mutant("shard-drops-last", SHARD, "drop_last=False\n    )\n", "drop_last=True\n    )\n"),
    Mutant("never-shuffles", SHARD, "shuffle=shuffle", "shuffle=False"),
    Mutant("always-shuffles", SHARD, "shuffle=shuffle", "shuffle=True"),
    Mutant(
        "settings-dropped",
        SHARD,
        "    settings = {name: getattr(loader, name) for name in names}",
        "    settings = {name: getattr(loader, name) for name in names[:3]}",
    ),
    Mutant("share-rank-unchecked", SHARD, "    if not 0 <= rank < world_size:", "    if False:"),
    Mutant("sampling-unchecked", SHARD, "    _check_sampling(loader)\n", ""),
    Mutant(
        "sharded-unchecked",
        SHARD,
        "    if isinstance(sampler, DistributedSampler):",
        "    if False:",
    ),
    Mutant(
        "stream-sharded-unchecked",
        SHARD,
        "    if isinstance(stream, _StreamShare):",
        "    if False:",
    ),
    Mutant("own-batches-allowed", SHARD, "if has_own_batches or not is_plain", "if not is_plain"),
    Mutant(
        "replacement-allowed",
        SHARD,
        '    if getattr(sampler, "replacement", False):',
        "    if False:",
    ),
    Mutant(
        "part-allowed",
        SHARD,
        'return is_whole and getattr(sampler, "num_samples", len(dataset)) == len(dataset)',
        "return is_whole",
    ),
    Mutant(
        "other-source-allowed",
        SHARD,
        "is_whole = sampler.data_source is dataset",
        "is_whole = True",
    ),
    Mutant(
        "own-iteration-allowed",
        SHARD,
        "    if type(loader).__iter__ is not DataLoader.__iter__:",
        "    if False:",
    ),
    Mutant("empty-allowed", SHARD, "    if not len(dataset):", "    if False:"),
    Mutant("no-batch-allowed", SHARD, "    if not len(sharded):", "    if False:"),
    Mutant("empty-stream-allowed", SHARD, "        if position < 0:", "        if position < -1:"),
    Mutant(
        "stream-not-filled-up",
        SHARD,
        "        if place < self.rank and round_ % workers == worker_id:",
        "        if False:",
    ),
    Mutant(
        "stream-filled-by-every-worker",
        SHARD,
        "        if place < self.rank and round_ % workers == worker_id:",
        "        if place < self.rank:",
    ),
    Mutant(
        "workers-repeat",
        SHARD,
        "if place == self.rank and round_ % workers == worker_id:",
        "if place == self.rank:",
    ),
    Mutant("loop-with-gradients", LOOP, "with torch.no_grad(), _use", "with _use"),
    Mutant(
        "loop-runs-what-it-is-handed",
        LOOP,
        "                _forward(model, batch if",
        "                _forward(_module or model, batch if",
    ),
    Mutant("loop-bypasses-hooks", LOOP, "        model(batch)\n", "        model.forward(batch)\n"),
    Mutant(
        "loop-stays-on-device",
        LOOP,
        "batch if device is None else _to_device(batch, device)",
        "batch",
    ),
    Mutant(
        "nested-stay",
        LOOP,
        "return type(value)(_to_device(item, device) for item in value)",
        "return value",
    ),
    Mutant(
        "named-tuples-break",
        LOOP,
        '    if isinstance(value, tuple) and hasattr(value, "_fields"):',
        "    if False:",
    ),
    Mutant("cache-stays-on", LOOP, "        setattr(owner, name, False)", "        pass"),
    Mutant(
        "nested-cache-stays-on", LOOP, '(config, getattr(config, "text_config", None))', "(config,)"
    ),
    Mutant(
        "cache-not-restored",
        LOOP,
        "        elif was_own or name not in own:",
        "        elif False:",
    ),
    Mutant("cache-left-behind", LOOP, "            delattr(owner, name)", "            pass"),
    Mutant(
        "config-class-left-behind",
        LOOP,
        '            object.__setattr__(owner, "__class__", owner_class)',
        "            pass",
    ),
    Mutant("mesh-unchecked", LOOP, "    _check_ep_mesh(plan, ep_mesh)\n", ""),
    Mutant(
        "mesh-size-unchecked",
        LOOP,
        "(ep_mesh is None or ep_mesh.size() != plan.ep_size)",
        "ep_mesh is None",
    ),
    Mutant(
        "plan-not-read",
        LOOP,
        "    plan = distribution_plan(model)\n",
        "    plan = getattr(model, _PLAN_ATTRIBUTE, DistributionPlan())\n",
    ),
    Mutant(
        "counts-unchecked", LOOP, "            _check_batch_counts(dataloader)", "            pass"
    ),
    Mutant(
        "counts-unchecked-fsdp",
        LOOP,
        "(plan.is_expert_parallel or plan.is_fsdp_dense)",
        "plan.is_expert_parallel",
    ),
    Mutant(
        "counts-unchecked-experts",
        LOOP,
        "(plan.is_expert_parallel or plan.is_fsdp_dense)",
        "plan.is_fsdp_dense",
    ),
    Mutant(
        "counts-checked-always",
        LOOP,
        "if is_distributed_run() and (plan.is_expert_parallel or plan.is_fsdp_dense):",
        "if is_distributed_run():",
    ),
    Mutant(
        "experts-without-tokens-pass",
        EXPERTS,
        "            _check_experts_saw_tokens(model)",
        "            pass",
    ),
    Mutant(
        "experts-that-do-not-collect-fail",
        EXPERTS,
        'getattr(child, "_if_calib", False)',
        'getattr(child, "_if_calib", True)',
    ),
    Mutant(
        "experts-that-none-needs-fail",
        EXPERTS,
        "        if name not in idle_everywhere",
        "        if True",
    ),
    Mutant(
        "experts-of-an-earlier-loop-count",
        EXPERTS,
        "module._rows_seen = len(share), state, 0",
        "module._rows_seen = len(share), state, getattr(module, '_rows_seen', 0)",
        "plugins/expert_parallel.py",
    ),
    Mutant("progress-everywhere", LOOP, "disable=not is_master()", "disable=False"),
    Mutant("progress-nowhere", LOOP, "disable=not is_master()", "disable=True"),
    # The lock
    Mutant(
        "lock-not-exclusive",
        LOCK,
        "os.O_CREAT | os.O_EXCL | os.O_WRONLY",
        "os.O_CREAT | os.O_WRONLY",
    ),
    Mutant(
        "lock-removed-by-others",
        LOCK,
        "        if self._is_acquired:\n",
        "        if self.lockfile_path.exists():\n",
    ),
    Mutant("lock-kept", LOCK, "        self.release()\n", "        pass\n"),
    Mutant(
        "lock-enters-without-turn",
        LOCK,
        "while not self.try_acquire() and self.all_acquire:",
        "while not self.try_acquire() and False:",
    ),
    Mutant(
        "lock-waits-forever",
        LOCK,
        "            if time.monotonic() > deadline:",
        "            if False:",
    ),
    Mutant("lock-polls-as-it-likes", LOCK, "time.sleep(self.poll_time)", "time.sleep(0.25)"),
    Mutant("threads-not-awaited", RUN, "    time.sleep(_SETTLE_SECONDS)\n", ""),
    # The loader
    *(
        Mutant(name, LOAD, line, broken, LOADER)
        for name, line, broken in [
            ("dtype-always-auto", '{"dtype": "auto", **settings}', '{**settings, "dtype": "auto"}'),
            ("plans-not-compared", 'plan", check, _the_one_plan)', 'plan", check, len)'),
            (
                "plan-checked-alone",
                'all_reduce("load_pretrained: plan", check, _the_one_plan)',
                "check()",
            ),
            ("read-alone", 'all_reduce("load_pretrained: weights", read, len)', "read()"),
            ("callers-mesh-ignored", "expert_parallel and ep_mesh is None:", "expert_parallel:"),
            ("mesh-of-another-plan", "if ep_mesh is not None and", "if False and"),
            (
                "experts-stay-marked",
                "            _keep_local_experts(model)\n",
                "            pass\n",
            ),
            ("not-recorded", "    set_distribution_plan(models[0], plan)\n", ""),
            ("any-larger-world", "plan.world_size != size():", "plan.world_size < size():"),
            ("files-unchecked", "    _files(folder)\n    trust", "    trust"),
            ("degree-unchecked", "if experts.num_experts % plan.ep_size:", "if False:"),
            ("not-moved", "models.append(model.to(device))", "models.append(model)"),
            (
                "text-config-always",
                "config.get_text_config() if is_of_text else",
                "config.get_text_config() if True else",
            ),
            (
                "text-config-never",
                "config.get_text_config() if is_of_text else",
                "config if True else",
            ),
            (
                "no-dtype",
                "        config.dtype = _first_floating_dtype(tensors)\n",
                "        pass\n",
            ),
            ("freed-memory-kept", "    with _freed_memory_returned():\n", "    if True:\n"),
            (
                "incomplete-accepted",
                'if missing := sorted(info["missing_keys"]):',
                "if missing := []:",
            ),
            ("nameless", "    model.name_or_path = model.config.name_or_path = str(folder)\n", ""),
            ("no-generation-config", "        model.generation_config = generation\n", ""),
            ("of-a-class-of-its-own", "        self.__class__ = kind\n", ""),
            ("dense-whole", "            fsdp2_wrap(self)\n", "            pass\n"),
            (
                "experts-whole",
                "            shard_experts(self, ep_mesh)  # type: ignore[arg-type]\n",
                "            pass\n",
            ),
            (
                "experts-unmarked",
                "            _mark_local_experts(self, ep_mesh)  # type: ignore[arg-type]\n",
                "            pass\n",
            ),
            ("files-mapped", 'backend="pread"', 'backend="mmap"'),
            ("index-ignored", "if index.is_file():", "if False:"),
            ("no-file-accepted", "        if not file.is_file():", "        if False:"),
            ("bfloat16-as-half", '"BF16": torch.bfloat16', '"BF16": torch.float16'),
        ]
    ),
]


def _noticed_by(mutant: Mutant) -> list[str]:
    """Return the tests that fail, or error, on the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
        for name in ("modelopt", "tests", "pyproject.toml"):
            source, target = ROOT / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        module = Path(folder, MODULES, mutant.module)
        module.write_text(module.read_text().replace(mutant.line, mutant.broken))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": folder, "TMPDIR": folder}
        try:
            done = subprocess.run(
                [*command, *shlex.split(mutant.tests)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"(still running after {TIMEOUT_SECONDS:.0f} s)"]
    noticed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and not noticed:
        raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout}")
    return noticed


def main() -> int:
    """Try the mutants that are named, or all."""
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    for mutant in chosen:
        places = (ROOT / MODULES / mutant.module).read_text().count(mutant.line)
        if places != 1:
            raise SystemExit(f"{mutant.name}: {places} places match, not one")
    start, survivors = time.monotonic(), []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for mutant, noticed in zip(chosen, pool.map(_noticed_by, chosen), strict=True):
            print(f"{mutant.name}: {', '.join(noticed) or 'SURVIVED'}", flush=True)
            if not noticed:
                survivors.append(mutant.name)
    seconds = time.monotonic() - start
    print(f"{len(chosen)} mutants, {len(survivors)} survived, {seconds:.0f} s", *survivors)
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
