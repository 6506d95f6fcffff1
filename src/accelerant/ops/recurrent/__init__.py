"""Recurrent layers through the vendor's library: nn's LSTM and GRU call them, no public name does."""
