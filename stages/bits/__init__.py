"""Bits: how many each row of a drafter gets, so that the really coded file fits its allotment."""
