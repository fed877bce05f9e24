import os
from contextlib import closing
from pathlib import Path

from services.common.process import ALONE_SECONDS
from services.local.supervisor.layout import Layout
from services.local.supervisor.listen import choose_listen


def test_the_node_has_all_of_its_time_though_its_lifeline_ended_first(tmp_path: Path) -> None:
    with closing(choose_listen("127.0.0.1:0")) as listen:
        layout = Layout(tmp_path, tmp_path, listen, -1, os.environ, "text", "info")
        assert sum(seconds for _, seconds in layout.service_unit("node").stop) < ALONE_SECONDS
