"""The ranks' output on its way to the driver, without Spark."""

from __future__ import annotations

from io import BytesIO

from hvkeras.control.connection import Introduction
from hvkeras.host.network import LOOPBACK
from hvkeras.launcher.printer import Printer
from hvkeras.spark.output import OutputLink, OutputServer

SECRET = b"s" * 32


def test_what_ranks_print_is_shown_until_the_last_line() -> None:
    out, err = BytesIO(), BytesIO()
    output = OutputServer(2, SECRET, LOOPBACK, Printer(2, out, err))
    address = output.server.start()
    assert OutputLink.connect(address, b"another", Introduction(0, 2, "here")) is None
    for rank in range(2):
        link = OutputLink.connect(address, SECRET, Introduction(rank, 2, "here"))
        assert link is not None
        link.show("stdout", b"hello\n" if rank else b"\xe2\x82\xac\n")
        link.show("stderr", b"a complaint without end")
        link.close()
    output.finish()
    assert sorted(out.getvalue().decode().split("\n")) == ["", "[0] \u20ac", "[1] hello"]
    assert sorted(err.getvalue().decode().split("\n")) == ["", "[0] a complaint without end",
                                                           "[1] a complaint without end"]
    assert OutputLink.connect(address, SECRET, Introduction(0, 2, "here")) is None
