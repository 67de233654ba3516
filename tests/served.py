"""The HTTP service in a thread of this process, on a real socket; and who is still in it."""

import contextlib
from dataclasses import dataclass

import httpx
import openai

from plpkg.adapters import CONFIG, WEIGHTS
from plpkg.serving.engine import Engine
from plpkg.serving.service.http.api import app
from plpkg.serving.service.http.listener import Listener
from plpkg.serving.service.replica import Replica
from plpkg.serving.service.scheduler import Scheduler
from plpkg.serving.service.tiers import Tiers

from waiting import PATIENCE_S


@dataclass
class Service:
    """``client`` sends no key."""

    url: str
    replica: Replica
    client: httpx.Client

    def openai(self, key="none"):
        """The official client; close it, or it warns."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def upload(self, name, adapter, account="local", **options):
        """The response to an upload."""
        files = {part: (part, bytes(adapter.files[part])) for part in (CONFIG, WEIGHTS)}
        return self.client.post(f"/v1/accounts/{account}/adapters/{name}", files=files, **options)

    def complete(self, model, prompt="import", tokens=8, **fields):
        """The response to a greedy completion."""
        body = dict(model=model, prompt=prompt, max_tokens=tokens, temperature=0) | fields
        return self.client.post("/v1/completions", json=body)

    @property
    def inside(self):
        """How many requests run, how many wait, and how many adapters are leased."""
        scheduler = self.replica.scheduler
        return len(scheduler.running), len(scheduler.queued), self.replica.tiers.leases.total()


@contextlib.contextmanager
def served(model, tokenizer, store, *, name="base", keys=None, scheduler=None, engine=None, limits=None, **tiers):
    """A service of one replica, until the context ends; whoever is in it then is put out."""
    replica = Replica(
        Engine(model, tokenizer, **engine or {}),
        Tiers(store, model, limits=limits, **tiers),
        scheduler or Scheduler(),
    )
    api = app(replica, store, model, tokenizer, name=name, keys=keys, limits=limits)
    with Listener(api) as listener, httpx.Client(base_url=listener.address, timeout=PATIENCE_S) as client:
        yield Service(listener.address, replica, client)
