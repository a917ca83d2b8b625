"""Operations that compute each element of their results from one element of each operand."""

from __future__ import annotations

from dataclasses import replace

from hvkeras.partition.decisions import Call, Decision
from hvkeras.partition.layouts import ListOf
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.rules.lists import either

pattern("Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0"
        " BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil CheckNumerics CheckNumericsV2 Cos Cosh Dawsn Digamma"
        " Erf Erfc Erfinv Exp Expint Expm1 FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin Inv Invert IsFinite"
        " IsInf IsNan Lgamma Log Log1p LogicalNot Ndtri PopulationCount Reciprocal Rint Round Rsqrt Sigmoid Sign"
        " Sin Sinh Spence Sqrt Square Tan Tanh", "*->*")
pattern("ApproximateEqual FakeQuantWithMinMaxArgsGradient IgammaGradA RandomGammaGrad", "*,*->*")
pattern("FakeQuantWithMinMaxVars", "*,#,#->*")
pattern("FakeQuantWithMinMaxVarsPerChannel", "*C,C,C->*C")
pattern("Elu LeakyRelu Relu Relu6 Selu Softplus Softsign", "*->*")
pattern("EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad", "*,*->*", linear=(0,))
pattern("InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad", "*,*->*", linear=(1,))
pattern("Atan2 BitwiseAnd BitwiseOr BitwiseXor Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac LeftShift"
        " Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod NextAfter NotEqual Polygamma Pow RightShift"
        " SquaredDifference TruncateDiv TruncateMod Zeta", "*,*->*")
pattern("Betainc ClipByValue", "*,*,*->*")
pattern("Add AddV2 Sub", "*,*->*", linear="jointly")
pattern("Conj Imag Neg Real", "*->*", linear="each")
pattern("Mul", "*,*->*", linear="each")
pattern("Div DivNoNan MulNoNan RealDiv Xdivy Xlog1py Xlogy", "*,*->*", linear=(0,))


@rule("Identity", "PreventGradient", "Snapshot", "StopGradient")
def identity(call: Call) -> Decision:
    """The result is the operand, whatever it is."""
    return Decision((call.operands[0].layout,), (call.operands[0],))


@rule("IdentityN")
def identities(call: Call) -> Decision:
    """The results are the operands."""
    return Decision(tuple(value.layout for value in call.operands), call.operands)


@rule("AddN")
def add(call: Call) -> Pattern | Decision | None:
    """Lists are added element by element."""
    if not all(isinstance(value.layout, ListOf) for value in call.operands):
        return fitted(call, "*,*->*", linear="jointly")
    result = call.operands[0]
    for value in call.operands[1:]:
        result = replace(either(result, value), integers=None)
    return Decision((result.layout,) * len(call.operands), (result,))


@rule("Bitcast")
def bitcast(call: Call) -> Pattern | None:
    """Types of unlike sizes differ in a last dimension."""
    source, target = call.operation.inputs[0].dtype.size, call.operation.outputs[0].dtype.size
    return fitted(call, "*->*" if source == target else "*->*." if source > target else "*K->*")


@rule("Cast")
def cast(call: Call) -> Pattern | None:
    """Converting floating point numbers to integers is not linear, nor is rounding them to fewer digits quite."""
    source, target = call.operation.inputs[0].dtype, call.operation.outputs[0].dtype
    keeps_sums = target.is_floating and (source.is_integer or (source.is_floating and target.size >= source.size))
    return fitted(call, "*->*", linear="each" if keeps_sums else ())


@rule("Select", "SelectV2")
def select(call: Call) -> Pattern | None:
    """A vector of conditions may choose among rows (`Select`)."""
    of_rows = call.type == "Select" and call.rank(0) == 1 and (call.rank(1) or 0) > 1
    if of_rows:
        rest = "cdefghijklm"[:(call.rank(1) or 0) - 1]
        return fitted(call, f"b,b{rest},b{rest}->b{rest}", linear=(1, 2))
    return fitted(call, "*,*,*->*", linear=(1, 2))
