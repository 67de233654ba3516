"""Import contracts for ``lint-imports`` that take the rooms from ``plpkg.ROOMS``, so that no list repeats them."""

from importlinter.contracts.independence import IndependenceContract
from importlinter.contracts.layers import LayersContract

from plpkg import ROOMS

FOLDERS = [room for room in ROOMS if "." not in room]


class Floors(LayersContract):
    """Layers, of which the one that is called ``rooms`` stands for them all."""

    type_name = "floors"

    def __init__(self, name, session_options, contract_options):
        layers = [" : ".join(FOLDERS) if layer == "rooms" else layer for layer in contract_options["layers"]]
        super().__init__(name, session_options, contract_options | {"layers": layers})


class Rooms(IndependenceContract):
    """The rooms are independent of each other."""

    type_name = "rooms"

    def __init__(self, name, session_options, contract_options):
        super().__init__(name, session_options, contract_options | {"modules": [f"plpkg.{room}" for room in FOLDERS]})
