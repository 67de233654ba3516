"""The models that an account can ask for: the base, and its adapters, which it uploads and deletes.

Another account's adapter is as absent as one that never was.
"""

import asyncio
from collections import defaultdict

from fastapi import APIRouter, Request as Call
from starlette.datastructures import UploadFile

from plpkg.adapters import CONFIG, WEIGHTS, AdapterLimits, InvalidAdapterError, read_adapter
from plpkg.serving.service.http.intake import Parsed
from plpkg.serving.service.http.names import Names, stored_name
from plpkg.serving.service.store import NotFoundError, Store, stored_version

UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": {
    "type": "object", "required": [CONFIG, WEIGHTS],
    "properties": {name: {"type": "string", "format": "binary"} for name in (CONFIG, WEIGHTS)},
}}}}}  # fmt: skip


class Adapters:
    """Routes of models and of an account's adapters.

    Parameters
    ----------
    backend, store, names
        The replicas that answer, the store of adapters, and the names that accounts have for them.
    model
        The base, of which modules and configuration are read only.
    limits
        Of an adapter.
    longest
        Positions of the longest text; None if there is no limit.
    """

    def __init__(self, backend, store: Store, names: Names, model, limits: AdapterLimits, longest: int | None) -> None:
        self._backend = backend
        self._store = store
        self._names = names
        self._model = model
        self._limits = limits
        self._longest = longest
        self._in_memory = defaultdict(asyncio.Lock)  # an account's uploads, of up to max_bytes, one at a time
        self.router = APIRouter(route_class=Parsed)
        self.router.get("/v1/models")(self.models)
        self.router.get("/v1/models/{model_name:path}")(self.one_model)
        self.router.get("/v1/accounts/{account}/adapters")(self.adapters)
        one = "/v1/accounts/{account}/adapters/{adapter}"
        self.router.post(one, status_code=201, openapi_extra=UPLOAD)(self.upload)
        self.router.get(one)(self.one_adapter)
        self.router.delete(one)(self.delete)

    async def models(self, call: Call) -> dict:
        """The base, and the account's adapters."""
        account = call.state.account
        stored = await self._names.stored(account)
        theirs = [self._described(each["id"], account, each["version"]) for each in stored]
        return {"object": "list", "data": [self._base(), *theirs]}

    async def one_model(self, call: Call, model_name: str) -> dict:
        """The base, or one of the account's adapters."""
        if model_name == self._names.base:
            return self._base()
        account = call.state.account
        _, version = await self._names.existing(account, model_name)
        return self._described(model_name, account, version)

    def _base(self) -> dict:
        return self._described(self._names.base, "plpkg", self._names.base) | {"parent": None}

    def _described(self, identity: str, owner: str, root: str) -> dict:
        known = {"id": identity, "object": "model", "created": 0, "owned_by": owner, "root": root}
        return known | {"parent": self._names.base, "max_model_len": self._longest}

    async def adapters(self, call: Call, account: str) -> dict:
        """The account's adapters, with their versions."""
        return {"object": "list", "data": await self._names.stored(_theirs(call, account))}

    async def upload(self, call: Call, account: str, adapter: str) -> dict:
        """Keep an adapter, as PEFT writes it; a new version, if there is one of this name."""
        _theirs(call, account)
        self._names.require_possible(adapter)
        # The lock comes after the form: what is sent slowly goes to the disk, and nobody waits for it
        async with call.form(max_files=2, max_fields=0) as form, self._in_memory[account]:
            files = {part: await file.read() for part, file in form.items() if isinstance(file, UploadFile)}
            if set(files) != {CONFIG, WEIGHTS}:
                raise InvalidAdapterError(f"an upload has the files {CONFIG} and {WEIGHTS}, got {', '.join(files)}")
            made = await asyncio.to_thread(read_adapter, files[CONFIG], files[WEIGHTS], self._model, self._limits)
            before = await self._store.versions(account)
            version = await self._store.put(account, adapter, made)
            after = await self._store.versions(account)
            gone = {*before.get(adapter, [])} - {*after.get(adapter, [])}  # all, if it was deleted meanwhile
        for each in gone:  # of a full account: nothing is to be left of it in memory
            await self._backend.drop(f"{account}/{adapter}/{each}")
        return {"id": adapter, "version": version, "rank": made.rank, "bytes": made.num_bytes}

    async def one_adapter(self, call: Call, account: str, adapter: str) -> dict:
        """The current version of an adapter."""
        version = await self._store.current(_theirs(call, account), stored_name(adapter))
        return {"id": adapter, "version": version}

    async def delete(self, call: Call, account: str, adapter: str) -> dict:
        """Delete an adapter, NAME, or a version of it, NAME@SHA256."""
        stored, at, version = adapter.partition("@")
        place = [_theirs(call, account), stored_name(stored)]
        if at:
            place.append(stored_version(version))
        try:
            await self._store.delete(*place)
        except ValueError:  # the current version: all is as it was
            raise
        except BaseException:  # deleted by a process that died before this, perhaps
            await self._backend.drop("/".join(place))
            raise
        await self._backend.drop("/".join(place))
        return {"id": adapter, "deleted": True}


def _theirs(call: Call, account: str) -> str:
    if call.state.account != account:
        raise NotFoundError(f"this key has no account {account!r}")
    return account
