"""HLO opcodes, classified by the cost of their instructions."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TRANSCENDENTAL = _words(
    """
    acos acosh asin asinh atan2 atanh cbrt cosine cosh erf exponential exponential-minus-one log log-plus-one
    logistic power rsqrt sine sinh sqrt tan tanh
    """
)
ELEMENTWISE = _words(
    """
    abs add and bitcast-convert ceil clamp compare complex convert count-leading-zeros divide floor imag
    is-finite maximum minimum multiply negate not or popcnt real reduce-precision remainder round-nearest-afz
    round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign stochastic-convert
    subtract xor
    """
)
# Instructions that access no memory: they rename values, wait, or call a computation that is counted separately.
FREE = _words(
    """
    add-dependency after-all all-gather-done all-reduce-done all-to-all-done async-done async-start async-update
    bitcast call collective-broadcast-done collective-permute-done conditional constant copy-done domain fusion-done
    get-tuple-element opt-barrier optimization-barrier parameter partition-id ragged-all-to-all-done recv-done
    reduce-scatter-done replica-id send-done slice-done tuple while
    """
)
