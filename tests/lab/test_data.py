"""Downloads: hashes, resuming, and not trusting what comes."""

import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from madam_lab import data
from madam_lab.data import Source


class Server:
    """Serves bytes on loopback, with ranges; can hang up in the middle."""

    def __init__(self, files):
        self.files, self.requests, self.hang_up_after = files, [], None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                blob = outer.files[self.path]
                start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
                outer.requests.append((self.path, start))
                if start >= len(blob):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(blob) - start))
                self.end_headers()
                body = blob[start:]
                if outer.hang_up_after is not None:
                    body, outer.hang_up_after = body[: outer.hang_up_after], None
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server():
    made = Server({"/words.txt": b"some words " * 1000})
    yield made
    made.close()


def source_of(server, path, blob, **more):
    return Source(server.address + path, "sha256:" + hashlib.sha256(blob).hexdigest(), **more)


def test_a_file_is_fetched_checked_and_not_fetched_again(server, tmp_path, monkeypatch):
    blob = server.files["/words.txt"]
    monkeypatch.setitem(data.SOURCES, "words", [source_of(server, "/words.txt", blob, target="w/train.txt")])
    said = []
    for _ in range(2):
        data.download("words", tmp_path, said.append)
    assert (tmp_path / "w" / "train.txt").read_bytes() == blob
    assert server.requests == [("/words.txt", 0)]
    assert said[-1].endswith("is there")
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["train.txt"]


def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path, monkeypatch):
    blob = server.files["/words.txt"]
    monkeypatch.setitem(data.SOURCES, "words", [source_of(server, "/words.txt", blob, target="w/train.txt")])
    part = tmp_path / "w" / "words.txt.part"
    part.parent.mkdir()
    part.write_bytes(blob[:4000])
    data.download("words", tmp_path, lambda line: None)
    assert server.requests == [("/words.txt", 4000)]
    assert (tmp_path / "w" / "train.txt").read_bytes() == blob


def test_a_connection_that_ends_early_keeps_what_came(server, tmp_path, monkeypatch):
    blob = server.files["/words.txt"]
    monkeypatch.setitem(data.SOURCES, "words", [source_of(server, "/words.txt", blob, target="w/train.txt")])
    server.hang_up_after = 4000
    with pytest.raises(data.DownloadError, match=r"7000 bytes early.*goes on"):
        data.download("words", tmp_path, lambda line: None)
    data.download("words", tmp_path, lambda line: None)
    assert server.requests == [("/words.txt", 0), ("/words.txt", 4000)]
    assert (tmp_path / "w" / "train.txt").read_bytes() == blob


def test_a_wrong_hash_is_refused_and_removed(server, tmp_path, monkeypatch):
    monkeypatch.setitem(data.SOURCES, "words", [source_of(server, "/words.txt", b"other", target="w/train.txt")])
    with pytest.raises(data.DownloadError, match=r"another hash.*try again"):
        data.download("words", tmp_path, lambda line: None)
    assert list((tmp_path / "w").iterdir()) == []


def archive_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, blob in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))
    return buffer.getvalue()


def test_an_archive_is_unpacked_into_its_folder(server, tmp_path, monkeypatch):
    blob = archive_of({"set/a": b"1", "set/b": b"2"})
    server.files["/set.tar.gz"] = blob
    monkeypatch.setitem(data.SOURCES, "set", [source_of(server, "/set.tar.gz", blob, target="set", archive=True)])
    data.download("set", tmp_path, lambda line: None)
    assert sorted(p.name for p in (tmp_path / "set").iterdir()) == ["a", "b"]
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_what_an_archive_calls_otherwise_gets_its_place(server, tmp_path, monkeypatch):
    tar = archive_of({"set2-160/a": b"1"})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as wheel:
        wheel.writestr("package/default.pt", b"network")
        wheel.writestr("package/other.py", b"raise SystemExit")
    server.files |= {"/set.tgz": tar, "/package.whl": buffer.getvalue()}
    sources = [
        source_of(server, "/set.tgz", tar, target="set", archive=True, inside="set2-160"),
        source_of(
            server, "/package.whl", buffer.getvalue(), target="n/net.pt", archive=True, inside="package/default.pt"
        ),
    ]
    monkeypatch.setitem(data.SOURCES, "both", sources)
    data.download("both", tmp_path, lambda line: None)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["n", "n/net.pt", "set", "set/a"]
    assert (tmp_path / "n" / "net.pt").read_bytes() == b"network"


def test_a_damaged_folder_is_replaced(server, tmp_path, monkeypatch):
    blob = archive_of({"set/a": b"1", "set/b": b"2"})
    server.files["/set.tar.gz"] = blob
    monkeypatch.setitem(data.SOURCES, "set", [source_of(server, "/set.tar.gz", blob, target="set", archive=True)])
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_bytes(b"damaged")
    data.download("set", tmp_path, lambda line: None)
    assert {p.name: p.read_bytes() for p in (tmp_path / "set").iterdir()} == {"a": b"1", "b": b"2"}
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_an_archive_that_leaves_its_folder_is_refused(server, tmp_path, monkeypatch):
    blob = archive_of({"../escaped": b"1", "set/a": b"1"})
    server.files["/set.tar.gz"] = blob
    monkeypatch.setitem(data.SOURCES, "set", [source_of(server, "/set.tar.gz", blob, target="in/set", archive=True)])
    with pytest.raises(tarfile.OutsideDestinationError):
        data.download("set", tmp_path, lambda line: None)
    assert not (tmp_path / "in" / "escaped").exists()
    assert not (tmp_path / "escaped").exists()


def test_an_unknown_data_set_is_named(tmp_path):
    with pytest.raises(
        ValueError,
        match="no data set is called 'mnist'; choose one of cifar10, cifar100, imagenette, inception, wikitext2",
    ):
        data.download("mnist", tmp_path)


def test_the_folder_is_given_or_in_the_environment_or_here(monkeypatch, tmp_path):
    monkeypatch.delenv("MADAM_DATA", raising=False)
    assert str(data.root(None)) == "data"
    monkeypatch.setenv("MADAM_DATA", str(tmp_path))
    assert data.root(None) == tmp_path
    assert data.root(tmp_path / "x") == tmp_path / "x"
