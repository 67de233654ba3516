from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Terms(_message.Message):
    __slots__ = ("protocol", "model", "hidden", "targets", "projections", "r_c2d", "r_d2c", "init", "projection_seed", "precision", "first_k", "last_k", "bases", "riders", "late")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PROJECTIONS_FIELD_NUMBER: _ClassVar[int]
    R_C2D_FIELD_NUMBER: _ClassVar[int]
    R_D2C_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_SEED_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    FIRST_K_FIELD_NUMBER: _ClassVar[int]
    LAST_K_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    RIDERS_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    hidden: int
    targets: str
    projections: _containers.RepeatedScalarFieldContainer[int]
    r_c2d: int
    r_d2c: int
    init: str
    projection_seed: int
    precision: str
    first_k: int
    last_k: int
    bases: str
    riders: _containers.RepeatedScalarFieldContainer[int]
    late: bool
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., hidden: _Optional[int] = ..., targets: _Optional[str] = ..., projections: _Optional[_Iterable[int]] = ..., r_c2d: _Optional[int] = ..., r_d2c: _Optional[int] = ..., init: _Optional[str] = ..., projection_seed: _Optional[int] = ..., precision: _Optional[str] = ..., first_k: _Optional[int] = ..., last_k: _Optional[int] = ..., bases: _Optional[str] = ..., riders: _Optional[_Iterable[int]] = ..., late: _Optional[bool] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("terms",)
    TERMS_FIELD_NUMBER: _ClassVar[int]
    terms: Terms
    def __init__(self, terms: _Optional[_Union[Terms, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("tokens", "forgets")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORGETS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    forgets: bool
    def __init__(self, tokens: _Optional[int] = ..., forgets: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("batch", "seq", "new_sequence", "train", "positions", "input_gradient", "hidden", "keep")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    INPUT_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    batch: int
    seq: int
    new_sequence: bool
    train: bool
    positions: int
    input_gradient: bool
    hidden: bytes
    keep: int
    def __init__(self, batch: _Optional[int] = ..., seq: _Optional[int] = ..., new_sequence: _Optional[bool] = ..., train: _Optional[bool] = ..., positions: _Optional[int] = ..., input_gradient: _Optional[bool] = ..., hidden: _Optional[bytes] = ..., keep: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("hidden", "round_trips")
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIPS_FIELD_NUMBER: _ClassVar[int]
    hidden: bytes
    round_trips: int
    def __init__(self, hidden: _Optional[bytes] = ..., round_trips: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("group", "data", "unanswered")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    group: int
    data: bytes
    unanswered: bool
    def __init__(self, group: _Optional[int] = ..., data: _Optional[bytes] = ..., unanswered: _Optional[bool] = ...) -> None: ...

class FromDevice(_message.Message):
    __slots__ = ("hello", "step", "residual", "grad_hidden", "grad_input")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    GRAD_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    GRAD_INPUT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: Step
    residual: Part
    grad_hidden: bytes
    grad_input: Part
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., residual: _Optional[_Union[Part, _Mapping]] = ..., grad_hidden: _Optional[bytes] = ..., grad_input: _Optional[_Union[Part, _Mapping]] = ...) -> None: ...

class FromCloud(_message.Message):
    __slots__ = ("welcome", "residual", "final", "grad_output", "grad_hidden")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    GRAD_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GRAD_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    residual: Part
    final: Final
    grad_output: Part
    grad_hidden: bytes
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., residual: _Optional[_Union[Part, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ..., grad_output: _Optional[_Union[Part, _Mapping]] = ..., grad_hidden: _Optional[bytes] = ...) -> None: ...
