"""The goodput controller: how much to draft, decided from measured cost and calibrated chances. No torch."""
