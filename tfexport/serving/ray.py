"""The HTTP application as a deployment of Ray Serve: replicas on one machine or many.

    serve run tfexport.serving.ray:app bundles=de-en=/models/de-en precision=int8 replicas=2

Ray's proxy ──> a replica with few requests ──> the application of `create_app`, with a scheduler for each bundle

Arguments are those of `tfexport serve` and of `ReplicaOptions`. Each may also come from the environment of the process that
builds the application: TFEXPORT_SERVE_BUNDLES, TFEXPORT_SERVE_REPLICAS and so on.
"""
# Without `from __future__ import annotations`, because Ray reads the type of the builder's argument.

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

from fastapi import FastAPI
from pydantic import Field, ValidationInfo, create_model, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from ray import serve
from ray.serve import Application

from tfexport.api.model import Model
from tfexport.decoding.request_options import RuntimeOptions
from tfexport.option import checked, declared
from tfexport.scheduling.options import ServingOptions
from tfexport.serving.app import create_app
from tfexport.serving.catalog import Catalog, CatalogEntry, HowToLoad
from tfexport.serving.options import ServerOptions
from tfexport.serving.replica_options import ReplicaOptions
from tfexport.serving.v1.schemas import option_fields
from tfexport.system.processes import leave_out_of_collections

OF_RAY = frozenset({"host", "port", "worker_kind"})
"""Options that Ray determines. Its proxies listen. Workers are threads: a fork of a replica would inherit locks of Ray's
threads without the threads that release them."""

Group = TypeVar("Group")


class _Settings(BaseSettings):
    """The base class of `Arguments`, whose fields may also come from the environment."""

    model_config = SettingsConfigDict(env_prefix="TFEXPORT_SERVE_", enable_decoding=False, extra="forbid")

    bundles: list[str] = Field(min_length=1, description="Bundles as DIR or NAME=DIR, separated by commas.")
    threads: int | None = Field(1, ge=1, le=256, description="CPU threads of each worker.")

    @field_validator("*", mode="before")
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> Any:
        """Split strings into lists: the command line and the environment have only strings."""
        known = cls.model_fields.get(info.field_name or "")
        return value.split(",") if isinstance(value, str) and known and _is_list(known.annotation) else value

    def of(self, group: type[Group]) -> Group:
        """The options of a group."""
        values = {name: getattr(self, name) for name in declared(group) if name not in OF_RAY}
        return group(**checked(group, {name: value for name, value in values.items() if value is not None}))


def _is_list(hint: Any) -> bool:
    """Whether a type allows lists but no strings."""
    parts = get_args(hint)
    return get_origin(hint) is list or (str not in parts and any(map(_is_list, parts)))


_fields = option_fields(ReplicaOptions, ServerOptions, RuntimeOptions, ServingOptions, files=True)
for _name in OF_RAY:
    del _fields[_name]

Arguments = create_model("Arguments", __base__=_Settings, **_fields)  # type: ignore[call-overload]
"""The arguments of `app`: `bundles`, `threads`, and every option of the groups."""


class Replica:
    """A process of Ray Serve that answers requests. Under Ray its base class has the application as `app`."""

    app: FastAPI

    def check_health(self) -> None:
        """Health check for Ray, which replaces a replica that raises.

        Raises:
            UnavailableError: a bundle no longer accepts requests.
        """
        self.app.state.catalog.require_health()

    def metrics(self) -> dict[str, dict[str, object]]:
        """The metrics of each bundle's scheduler in this replica: `serve.get_app_handle("default").metrics.remote()`."""
        models = {served.name: served.model for served in self.app.state.catalog.served}
        return {name: model.serving_metrics() for name, model in models.items() if isinstance(model, Model)}

    def __del__(self) -> None:
        """Ray calls this when all requests are answered, or their time is over."""
        self.app.state.catalog.close()


def app(arguments: Arguments) -> Application:  # type: ignore[valid-type]
    """The application for `serve run` and for config files of Ray Serve.

    Raises:
        TfexportError: an option is out of range, or a bundle has no usable name.
    """
    settings: Any = arguments
    entries = [_absolute(CatalogEntry.parse(text)) for text in settings.bundles]
    server, runtime = settings.of(ServerOptions), settings.of(RuntimeOptions)
    scheduling = replace(settings.of(ServingOptions), worker_kind="threads")
    how = HowToLoad(runtime.runtime, runtime.precision, settings.threads, server.certified, scheduling)

    def build() -> FastAPI:
        return _application(entries, how, server)

    return serve.deployment(serve.ingress(build)(Replica), name="tfexport", **deployment_options(arguments)).bind()


def deployment_options(arguments: Arguments) -> dict[str, Any]:  # type: ignore[valid-type]
    """The options of `ray.serve.deployment`.

    Raises:
        TfexportError: an option is out of range, or two of them exclude each other.
    """
    settings: Any = arguments
    options = settings.of(ReplicaOptions)
    scale: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        limits = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        scale = {"autoscaling_config": {**limits, "target_ongoing_requests": options.target_ongoing_requests}}
    cpus = options.num_cpus or settings.of(ServingOptions).workers * (settings.threads or 1)
    return {
        **scale,
        "ray_actor_options": {"num_cpus": cpus},
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_queued_requests": options.max_queued_requests,
        "graceful_shutdown_timeout_s": options.shutdown_timeout,
        "graceful_shutdown_wait_loop_s": 1.0,
    }


def _application(entries: Sequence[CatalogEntry], how: HowToLoad, options: ServerOptions) -> FastAPI:
    """Load the bundles in a replica."""
    catalog = Catalog(entries, how)
    application = create_app(catalog, options)
    application.state.catalog = catalog
    leave_out_of_collections()
    return application


def _absolute(entry: CatalogEntry) -> CatalogEntry:
    """An entry with an absolute path: replicas have other working directories than the process that builds the app."""
    return CatalogEntry(entry.name, entry.directory.absolute())
