"""An S3 server (moto's) on this machine that counts what it is asked for, and can be slow, refuse or change objects.

Clients of Google's and Azure's stores are answered, too. What such a client asks of Google is what it asks of S3, with
another credential; of Azure it expects another listing, which is made here.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from xml.etree.ElementTree import Element, SubElement, tostring

import boto3
from botocore.config import Config
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ACCESS_KEY = "AKIATESTING"
SECRET_KEY = "not-to-be-printed"
BUCKET = "recordings"
ACCOUNT = "testing"
_CLEARED = ("AWS_", "AZURE_", "GOOGLE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")

StartResponse = Callable[..., Any]


class Requests(Counter[str]):
    """How many there were of LIST, HEAD and GET, and the bytes of what they were answered with."""

    @property
    def num_bytes(self) -> int:
        return self["bytes"]

    @property
    def num_requests(self) -> int:
        return self["LIST"] + self["HEAD"] + self["GET"]


class StoreServer:
    """Serves until `close`; `requests` counts since it was set."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests = Requests()
        self.delay_s = 0.0
        """Before each answer, as a store far away."""
        self.at_once = 0
        """Most requests that were under way together."""
        self.before: Callable[[str, str], None] = lambda method, path: None
        """Called with each request, before it is answered."""
        self._under_way = 0
        self._lock = threading.Lock()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="store-server", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.client = client_of(self.url, read_timeout=20, max_attempts=1)
        self.client.create_bucket(Bucket=BUCKET)

    def close(self) -> None:
        self.client.close()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def environment(self, outer: Mapping[str, str], home: Path) -> dict[str, str]:
        """What a process needs to find the store, and nothing of the caller's own stores."""
        return store_environment(self.url, outer, home)

    def upload(self, folder: Path, to: str) -> str:
        """Copy a folder up, as `aws s3 cp --recursive` does, and return where it is."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{to}/{path.relative_to(folder)}", path.read_bytes())
        return f"s3://{BUCKET}/{to}"

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=key, Body=content)

    @contextmanager
    def counting(self) -> Iterator[Requests]:
        """The requests of a block."""
        self.requests, self.at_once = Requests(), 0
        yield self.requests

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        counts, method, path = self.requests, environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = dict(parse_qsl(environ.get("QUERY_STRING", "")))
        kind = "LIST" if method == "GET" and "list-type" in query else method
        kind = "Azure's" if "comp" in query else kind  # counted as the LIST that its answer is made of
        with self._lock:
            self._under_way += 1
            self.at_once = max(self.at_once, self._under_way)
        try:
            self.before(kind, path)
            time.sleep(self.delay_s)
            refused = _refusal(environ.get("HTTP_AUTHORIZATION", ""))
            if refused is not None:
                body = f"<Error><Code>{refused}</Code><Message>{environ.get('HTTP_AUTHORIZATION')}</Message></Error>"
                start_response("403 Forbidden", [("Content-Type", "application/xml")])
                content = body.encode() if method != "HEAD" else b""
            elif "comp" in query:
                content = self._list_blobs(path.strip("/"), query)
                start_response("200 OK", [("Content-Type", "application/xml")])
            else:
                if "Credential=" not in environ["HTTP_AUTHORIZATION"]:  # by which moto knows its service
                    environ["HTTP_AUTHORIZATION"] = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/"
                content = b"".join(self._app(environ, start_response))
        finally:
            with self._lock:
                self._under_way -= 1
        with self._lock:
            counts[kind] += 1
            counts["bytes"] += len(content)
        return [content]

    def _list_blobs(self, container: str, query: Mapping[str, str]) -> bytes:
        """The listing of a bucket, as Azure would answer."""
        wanted = {"Prefix": query.get("prefix", ""), "Delimiter": query.get("delimiter", "")}
        listed = self.client.list_objects_v2(Bucket=container, **wanted)
        blobs = Element("Blobs")
        for found in listed.get("Contents", ()):
            blob = SubElement(blobs, "Blob")
            SubElement(blob, "Name").text = found["Key"]
            properties = SubElement(blob, "Properties")
            SubElement(properties, "Last-Modified").text = format_datetime(
                found["LastModified"].astimezone(UTC), usegmt=True
            )
            SubElement(properties, "Content-Length").text = str(found["Size"])
            SubElement(properties, "Content-Type").text = "application/octet-stream"
            SubElement(properties, "Etag").text = found["ETag"].strip('"')
        for folder in listed.get("CommonPrefixes", ()):
            SubElement(SubElement(blobs, "BlobPrefix"), "Name").text = folder["Prefix"]
        result = Element("EnumerationResults")
        result.extend([blobs, Element("NextMarker")])
        return tostring(result)


def client_of(url: str, *, read_timeout: int, max_attempts: int) -> Any:
    """A client of boto3's for a server at `url`, which no proxy of the environment comes between."""
    waiting = Config(proxies={}, connect_timeout=5, read_timeout=read_timeout, retries={"max_attempts": max_attempts})
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=waiting,
    )


def store_environment(url: str, outer: Mapping[str, str], home: Path) -> dict[str, str]:
    """What a process needs to find a store at a URL, and nothing of the caller's own stores."""
    kept = {name: value for name, value in outer.items() if not name.upper().startswith(_CLEARED)}
    return kept | {
        "HOME": str(home),
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "GOOGLE_BASE_URL": url,
        "GOOGLE_BEARER_TOKEN": SECRET_KEY,
        "AZURE_STORAGE_ENDPOINT": url,
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(SECRET_KEY.encode()).decode(),
    }


def _refusal(authorization: str) -> str | None:
    """What a store says to who shows no key, or another one; moto itself takes them all."""
    if not authorization:
        return "AccessDenied"
    if authorization == f"Bearer {SECRET_KEY}" or authorization.startswith(f"SharedKey {ACCOUNT}:"):
        return None
    return None if f"Credential={ACCESS_KEY}/" in authorization else "InvalidAccessKeyId"
