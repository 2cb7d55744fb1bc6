"""Search: shapes of the same size as a baseline that run faster, predicted in arrays.

    request, baseline -> space -> grid -> lowering, parameters and memory traced once -> evaluated in arrays -> best

The formulas are those of lowering, memory, pricing and prediction: tracing (core.traced) runs the same code.
"""
