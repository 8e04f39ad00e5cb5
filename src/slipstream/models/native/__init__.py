"""Slipstream's own forward pass for processors with AVX2, compiled where it is used.

``build`` makes and loads the library, ``panels`` keeps weights as it reads them, ``stack`` runs a decoder with it.
"""
