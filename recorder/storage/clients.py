"""Clients of object stores, and `KINDS`, the registry of stores by URL scheme.

A client must never wait without a timeout, and never show the credentials of a store or of the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ..errors import StoreError, not_installed

_CONNECT_TIMEOUT_S = 5
_ROLE_TIMEOUT_S = 1
"""The connect timeout if no credentials are set. Most machines then have no role, and no metadata service answers."""
_SILENCE_TIMEOUT_S = 5
"""The most seconds to wait for the next byte. A store that hangs is given up after `_NUM_TRIES` tries, about 20 s."""
_NUM_TRIES = 3

Answer = TypeVar("Answer")


_REFUSED = {
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "InvalidClientTokenId": "the session token is not valid",
    "InvalidToken": "the session token is not valid",
    "ExpiredToken": "the session token has expired",
    "RequestExpired": "the request's time is not accepted; set this machine's clock",
    "RequestTimeTooSkewed": "the request's time is not accepted; set this machine's clock",
}
"""For each error code of a store, the reason that messages give."""
_UNREACHED = {
    "dns error": "its host is not known",
    "ConnectionRefused": "it takes no connection",
    "ertificate": "its certificate is not trusted (AWS_CA_BUNDLE names others)",
    "InvalidMessage": "it does not speak TLS",
    "TimedOut": "it does not answer",
}
"""For each word in an error of `obstore`, the reason that messages give."""


class Client:
    """A client of one bucket, with credentials if there are any. Called on any thread."""

    def __init__(
        self, scheme: str, bucket: str, *, silence_s: float = _SILENCE_TIMEOUT_S, num_tries: int = _NUM_TRIES
    ) -> None:
        """Prepare the client. No request is made yet.

        `silence_s` is the longest wait for the next byte, including the time to send a part. A request that gets no
        answer is tried `num_tries` times.
        """
        self._silence_s = silence_s
        self._num_tries = num_tries
        self._scheme = scheme
        self._bucket = bucket
        self.kind = KINDS[scheme]
        self._is_anonymous = False
        self.renew()

    def ask(self, path: object, question: Callable[[Any], Answer]) -> Answer:
        """Make a request to the store. Raises FileNotFoundError for a missing object, or else StoreError.

        The client's own error is raised if the condition of an upload does not hold.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            return question(self._store)
        except (AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            if not re.search("<Code>(NoSuchBucket|ContainerNotFound)<", str(error)):
                raise FileNotFoundError(2, "No such object", str(path)) from None
            problem: Exception = error
        except (BaseError, OSError, ValueError) as error:
            problem = error
        if _is_without_credentials(str(problem)) and not (self._is_anonymous or self._names_credentials):
            self._is_anonymous = True  # the machine has no role with credentials
            self.__dict__.pop("_store", None)
            return self.ask(path, question)
        raise self._refusal(problem, path) from None

    def renew(self) -> None:
        """Forget the credentials, so that the next request reads them again from a file or a profile."""
        self._is_anonymous = self.kind.has_no_role(os.environ) and not self._names_credentials
        self.__dict__.pop("_store", None)

    @property
    def filesystem(self) -> Any:
        """The store as a file system for `pyarrow.dataset`. It makes its own requests."""
        from obstore.fsspec import FsspecStore
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        scheme: Any = self._scheme
        return PyFileSystem(FSSpecHandler(FsspecStore(scheme, **self._options)))

    @cached_property
    def _store(self) -> Any:
        import obstore.store

        options = self._options
        try:
            return getattr(obstore.store, self.kind.client)(self._bucket, **options)
        except Exception as error:  # the error's text may contain the value of a setting
            problem = f"no client can be made of the settings ({type(error).__name__})"
        raise StoreError(f"{self._scheme}://{self._bucket}: {problem}; see {self.kind.advice}")

    @property
    def _options(self) -> dict[str, Any]:
        endpoint = self.kind.endpoint(os.environ)
        url = urlsplit(endpoint)
        if endpoint and (url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc):
            name = self.kind.endpoints.split()[-1]
            raise StoreError(f"{name}: expected http://HOST:PORT or https://HOST:PORT, without a user")
        asks_for_role = not (self._is_anonymous or self._names_credentials)
        client: dict[str, Any] = {
            "allow_http": url.scheme == "http",
            "connect_timeout": timedelta(seconds=_ROLE_TIMEOUT_S if asks_for_role else _CONNECT_TIMEOUT_S),
            "read_timeout": timedelta(seconds=self._silence_s),
            "timeout": timedelta(days=1),  # limits a complete answer; `read_timeout` limits each pause in the answer
        }
        retries = {"max_retries": self._num_tries - 1, "retry_timeout": timedelta(minutes=1)}
        options: dict[str, Any] = {"client_options": client, "retry_config": retries}
        if endpoint:
            options[self.kind.endpoint_option] = endpoint
        if self._is_anonymous:
            options["skip_signature"] = True
        if bundle := self.kind.certificates and os.environ.get(self.kind.certificates):
            try:
                client["root_certificate"] = Path(bundle).read_bytes()
            except OSError as error:
                raise StoreError(f"{self.kind.certificates}: {bundle} cannot be read ({error.strerror})") from error
        return options | self.kind.options(self._bucket, os.environ)

    @property
    def _names_credentials(self) -> bool:
        return self.kind.names_credentials(os.environ)

    def _refusal(self, error: Exception, path: object) -> StoreError:
        """Return an error in our own words. The text of a store may contain an access key."""
        text, bucket, advice = str(error), f"{self._scheme}://{self._bucket}", self.kind.advice
        endpoint = self.kind.endpoint(os.environ) or self.kind.title
        code, status = _last(r"<Code>(\w+)<", text), _last(r"status: (\d{3}),", text)
        if _is_without_credentials(text) or (status in ("401", "403") and not self._names_credentials):
            text = f"{bucket}: no credentials were found, and {endpoint} needs credentials: set {advice}"
            return StoreError(text, "anonymous")
        if happened := text.partition("HttpError {")[2]:
            reason = next((cause for word, cause in _UNREACHED.items() if word in happened), "the connection was lost")
            name = self.kind.endpoints.split()[-1]
            text = f"{bucket}: the store at {endpoint} cannot be reached: {reason}; {name} sets the address"
            return StoreError(text, "unreachable")
        if code in ("NoSuchBucket", "ContainerNotFound"):
            return StoreError(f"{bucket}: no such bucket in the store at {endpoint}", "refused")
        if code in _REFUSED or status in ("401", "403"):
            reason = _REFUSED.get(code, "access is denied")
            return StoreError(f"{bucket}: {endpoint} refuses the credentials: {reason}; see {advice}", "refused")
        if status == "404":
            return StoreError(f"{bucket}: no such bucket at {endpoint}, or no store of this kind", "refused")
        if status == "416":
            return changed(path)
        if code == "PermanentRedirect" or "BareRedirect" in text:
            return StoreError(f"{bucket}: the bucket is in another region; set AWS_REGION to it")
        if type(error).__name__ == "InvalidPathError":
            return StoreError(f"{path}: holds an object with '//', '.' or '..' in its path; remove that object")
        shown = " ".join(filter(None, (code, status and f"HTTP {status}"))) or "no reason given"
        kind = "busy" if code == "SlowDown" or status in ("429", "503") else "failed"
        return StoreError(f"{path}: {endpoint} failed ({shown}); try again", kind)


def bare_e_tag(e_tag: str | None) -> str:
    """Return an ETag without quotes, and without the ``W/`` of a weak ETag."""
    return (e_tag or "").removeprefix("W/").strip('"')


def changed(path: object) -> StoreError:
    """Return the error for an object that was replaced after the listing."""
    text = f"{path}: the object was replaced since the run was listed; open the run again"
    return StoreError(text, "changed")


def _is_without_credentials(text: str) -> bool:
    return (
        re.search(r"MissingAccessKeyId|token request|performing [A-Z]+ \S+/latest/(api/token|meta-data/)", text)
        is not None
    )


def _last(pattern: str, text: str) -> str:
    """Return the last match in an error's text. The text begins with the path, which may contain anything."""
    return next(reversed(re.findall(pattern, text)), "")


_ASKED_BY_BOTO3 = ("sso_session", "sso_start_url", "credential_process", "role_arn")
"""The settings of an AWS profile that need boto3, because credentials come from more requests or another program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """The facts about the stores of one URL scheme. Some fields list several settings, separated by spaces."""

    client: str
    """The name of the class in `obstore.store`."""
    title: str
    endpoints: str
    """The settings that replace the provider's endpoint. The first one that is set is used."""
    endpoint_option: str = "endpoint"
    """The argument of the client's class for the URL of the endpoint."""
    credentials: str
    """The settings that say where credentials are found; one is enough."""
    file: str
    """The file with credentials that is read if none of the settings in `credentials` is set."""
    advice: str
    """The settings that a message suggests if credentials are missing or refused."""
    certificates: str = ""
    """The setting that names a file of trusted certificates."""
    version_tag: str = "e_tag"
    """The part of an object's metadata that names the object's version for a conditional put."""

    def endpoint(self, environ: Mapping[str, str]) -> str:
        """Return the endpoint's URL from the environment or a profile. Empty means the provider's own endpoint."""
        return next(filter(None, map(environ.get, self.endpoints.split())), "")

    def names_credentials(self, environ: Mapping[str, str]) -> bool:
        """Return True if a setting or a file has credentials. A machine with a role needs no credentials."""
        return any(map(environ.get, self.credentials.split())) or Path(self._file(environ)).expanduser().is_file()

    def has_no_role(self, environ: Mapping[str, str]) -> bool:
        """Return True if the environment says that this machine has no role with credentials."""
        return False

    def options(self, bucket: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the client's arguments that only this kind of store has."""
        return {}

    def _file(self, environ: Mapping[str, str]) -> str:
        return self.file


class AmazonS3(StoreKind):
    """Amazon S3. The profile is read here, because the client reads only the environment."""

    __slots__ = ()

    def endpoint(self, environ: Mapping[str, str]) -> str:
        if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            return ""
        return StoreKind.endpoint(self, environ) or _profile(environ).get("endpoint_url", "")

    def has_no_role(self, environ: Mapping[str, str]) -> bool:
        return environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"

    def options(self, bucket: str, environ: Mapping[str, str]) -> dict[str, Any]:
        is_in_host = not self.endpoint(environ) and "." not in bucket
        return {"virtual_hosted_style_request": is_in_host} | _from_profile(environ)

    def _file(self, environ: Mapping[str, str]) -> str:
        return environ.get("AWS_SHARED_CREDENTIALS_FILE") or self.file


KINDS = {
    "s3": AmazonS3(
        client="S3Store", title="Amazon S3", endpoints="AWS_ENDPOINT_URL_S3 AWS_ENDPOINT_URL",
        credentials="AWS_ACCESS_KEY_ID AWS_PROFILE AWS_WEB_IDENTITY_TOKEN_FILE AWS_CONTAINER_CREDENTIALS_FULL_URI "
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", file="~/.aws/credentials", certificates="AWS_CA_BUNDLE",
        advice="AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials",
    ),
    "gs": StoreKind(
        client="GCSStore", title="Google Cloud Storage", endpoints="GOOGLE_BASE_URL", endpoint_option="base_url",
        credentials="GOOGLE_APPLICATION_CREDENTIALS GOOGLE_BEARER_TOKEN GOOGLE_SERVICE_ACCOUNT "
        "GOOGLE_SERVICE_ACCOUNT_KEY GOOGLE_SERVICE_ACCOUNT_PATH",
        file="~/.config/gcloud/application_default_credentials.json",
        advice="GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        version_tag="version",  # the tag is the object's generation
    ),
    "az": StoreKind(
        client="AzureStore", title="Azure Blob Storage", endpoints="AZURE_STORAGE_ENDPOINT AZURE_ENDPOINT",
        credentials="AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ACCESS_KEY AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_SAS_KEY "
        "AZURE_STORAGE_TOKEN AZURE_CLIENT_ID AZURE_STORAGE_CLIENT_ID AZURE_USE_AZURE_CLI", file="/",
        advice="AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login` and set "
        "AZURE_USE_AZURE_CLI=true",
    ),
}  # fmt: skip
SCHEMES = ", ".join(f"{scheme}://" for scheme in KINDS)
"""The URL schemes of the stores, as messages list them."""
DESTINATIONS = SCHEMES.replace("://", "://BUCKET/PREFIX", 1)
"""The URLs that messages and help suggest as a destination."""


def _from_profile(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return region and credentials from the profile. The client itself reads only the environment."""
    profile = _profile(environ)
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or profile.get("region")
    options: dict[str, Any] = {"region": region} if region else {}
    if environ.get("AWS_ACCESS_KEY_ID"):
        return options
    if asked := next((name for name in _ASKED_BY_BOTO3 if name in profile), None):
        try:
            from boto3 import Session
            from obstore.auth.boto3 import Boto3CredentialProvider

            return options | {"credential_provider": Boto3CredentialProvider(Session())}
        except ImportError:
            raise StoreError(not_installed(f"s3://: {asked} of the profile", "boto3", "store")) from None
        except Exception as error:  # the error's text may contain the value of a setting
            problem = f"leads to no credentials ({type(error).__name__})"
        raise StoreError(f"s3://: {asked} of the profile {problem}")
    names = ("access_key_id", "secret_access_key", "session_token")
    return options | {name: profile[f"aws_{name}"] for name in names if f"aws_{name}" in profile}


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the profile in ~/.aws. Return no settings if it is missing or cannot be read."""
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    config = environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials"
    settings: dict[str, str] = {}
    for file, section in ((config, name if name == "default" else f"profile {name}"), (credentials, name)):
        parser = ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(Path(file).expanduser())
            settings |= parser[section]
        except (ConfigParserError, KeyError, OSError, RuntimeError, UnicodeDecodeError):
            continue  # if the credentials are missing, the store's refusal says so
    return settings
