"""Files that `--out` names: whole or as they were, and special files stay what they are."""

import os
import stat
import threading
from pathlib import Path

import pytest

from flexcp.cli.outputs import require_writable, write_output


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path):
    """The text cannot be encoded to its end, as a disk may not take it to its end."""
    kept = tmp_path / "page.html"
    kept.write_text("as it was")

    with pytest.raises(UnicodeEncodeError):
        write_output(kept, "half of it\ud800")
    assert kept.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_whoever_reads_the_old_one_reads_it_to_its_end(tmp_path):
    """A new file takes its place, with the permissions of the old one; one that is new has the usual."""
    kept, fresh = tmp_path / "kept.json", tmp_path / "fresh.json"
    kept.write_text("as it was")
    kept.chmod(0o640)
    with kept.open() as reader:
        write_output(kept, "new")
        assert reader.read() == "as it was"
    write_output(fresh, "new")
    (tmp_path / "usual").touch()

    assert kept.read_text() == fresh.read_text() == "new"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640
    assert fresh.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh.json", "kept.json", "usual"]


def test_pipes_and_links_stay_what_they_are(tmp_path):
    """/dev/stdout is a link to where the output goes; a file there must not be replaced under the shell."""
    pipe, target, link = tmp_path / "pipe", tmp_path / "target", tmp_path / "link"
    os.mkfifo(pipe)
    target.write_text("as it was")
    link.symlink_to(target)
    inode = target.stat().st_ino
    heard: list[str] = []
    listener = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    for path in (pipe, link):
        require_writable(path)
    listener.start()
    write_output(pipe, "through the pipe")
    write_output(link, "through the link")
    listener.join(timeout=10)

    assert heard == ["through the pipe"]
    assert link.is_symlink()
    assert (target.read_text(), target.stat().st_ino) == ("through the link", inode)


def test_standard_output_is_written_to(capfd):
    """As a user names it."""
    write_output(Path("/dev/stdout"), "text")

    assert capfd.readouterr().out == "text"
