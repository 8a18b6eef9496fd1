"""The kinds of object stores: one entry of `KINDS` says all that is peculiar to the stores of one scheme.

No other module names a scheme or asks which it is. Must never ask a store for anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError, not_installed

_ASKED_BY_BOTO3 = ("sso_session", "sso_start_url", "credential_process", "role_arn")
"""Settings of a profile that lead to credentials only by more requests or another program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """The facts about the object stores of one scheme. Blanks separate the names of settings."""

    client: str
    """The name of the class in `obstore.store`."""
    title: str
    endpoints: str
    """Settings that name another endpoint than the provider's; the first that is set counts."""
    endpoint_option: str = "endpoint"
    """The argument of the client that takes this endpoint."""
    credentials: str
    """Settings each of which says where credentials are."""
    file: str
    """The file with credentials where no setting names any."""
    advice: str
    """What a person sets, where credentials are missing or refused."""
    certificates: str = ""
    """The setting that names a file of certificates to trust."""
    version_tag: str = "e_tag"
    """What a conditional put names of the object that it replaces."""

    def endpoint(self, environ: Mapping[str, str]) -> str:
        """Return where a store is, by the environment or a profile; empty for the provider's own endpoint."""
        return next(filter(None, map(environ.get, self.endpoints.split())), "")

    def names_credentials(self, environ: Mapping[str, str]) -> bool:
        """Whether a setting or a file names credentials. A role of this machine needs neither."""
        return any(map(environ.get, self.credentials.split())) or Path(self._file(environ)).expanduser().is_file()

    def has_no_role(self, environ: Mapping[str, str]) -> bool:
        """Whether the environment says that this machine has no role to be asked for credentials."""
        return False

    def options(self, bucket: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of the client that this kind of store alone has."""
        return {}

    def _file(self, environ: Mapping[str, str]) -> str:
        return self.file


class AmazonS3(StoreKind):
    """S3, whose client reads the environment and no profile: the profile is read here."""

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
        version_tag="version",  # the generation of the object
    ),
    "az": StoreKind(
        client="AzureStore", title="Azure Blob Storage", endpoints="AZURE_STORAGE_ENDPOINT AZURE_ENDPOINT",
        credentials="AZURE_STORAGE_ACCOUNT_KEY AZURE_STORAGE_ACCESS_KEY AZURE_STORAGE_SAS_TOKEN AZURE_STORAGE_SAS_KEY "
        "AZURE_STORAGE_TOKEN AZURE_CLIENT_ID AZURE_STORAGE_CLIENT_ID AZURE_USE_AZURE_CLI", file="/",
        advice="AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or run `az login` and set "
        "AZURE_USE_AZURE_CLI=true",
    ),
}  # fmt: skip
"""The kind of store of each scheme."""
SCHEMES = ", ".join(f"{scheme}://" for scheme in KINDS)
"""The schemes as messages list them."""
DESTINATIONS = SCHEMES.replace("://", "://BUCKET/PREFIX", 1)
"""The URLs that messages and help propose as a destination."""


def _from_profile(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return region and credentials of the profile; the client itself reads the environment, and no profile."""
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
        except Exception as error:  # its text may repeat a setting
            problem = f"leads to no credentials ({type(error).__name__})"
        raise StoreError(f"s3://: {asked} of the profile {problem}")
    names = ("access_key_id", "secret_access_key", "session_token")
    return options | {name: profile[f"aws_{name}"] for name in names if f"aws_{name}" in profile}


def _profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the profile in ~/.aws; none where there is no such profile, or its file cannot be read."""
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
            continue  # where the credentials were in this file, the store refuses, and says so
    return settings
