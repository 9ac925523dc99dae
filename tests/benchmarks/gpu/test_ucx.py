"""The log in which UCX 1.23 tells the ways that it takes."""

from gpu.ucx import is_tcp, ways_to_read

LINE = "[1795844778.699687] [vm:25000:0]   "


def table(title: str, *rows: tuple[str, str, str]) -> str:
    border = "+--------+-------------+----------------+"
    lines = [border, "| reading-25000 intra-node cfg#1 |", f"| {title} |", border]
    lines += ["| Range  | Description | Config         |", border]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(LINE + line for line in [*lines, border]) + "\n"


READ = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda"


def test_reads_are_told_from_other_operations() -> None:
    log = (
        "INFO of another library\n"
        + table("active message by ucp_am_send* from host memory", ("0", "short", "tcp/lo"))
        + table("remote memory write by ucp_put* from host memory to host", ("0..inf", "zero-copy", "cma/memory"))
        + table(READ, ("0..inf", "zero-copy", "cuda_ipc/cuda"))
        + table("active message by ucp_am_send*(multi) from host memory", ("0..8184", "short", "tcp/lo"))
    )
    assert ways_to_read(log) == ["cuda_ipc/cuda"]
    assert not is_tcp(ways_to_read(log))


def test_all_ranges_of_a_read_count_once() -> None:
    rows = [("0..8184", "short", "tcp/lo"), ("8185..inf", "multi-frag", "tcp/lo")]
    log = table(READ, *rows) + table("remote memory read by ucp_get*(fast-completion) into cuda from cuda", *rows)
    assert ways_to_read(log) == ["tcp/lo"]
    assert is_tcp(ways_to_read(log))


def test_one_way_through_tcp_among_others_is_not_silent_tcp() -> None:
    log = table(READ, ("0..8184", "short", "tcp/lo"), ("8185..inf", "zero-copy", "cuda_ipc/cuda"))
    assert not is_tcp(ways_to_read(log))


def test_a_log_without_reads() -> None:
    assert ways_to_read("") == []
    assert not is_tcp([])
