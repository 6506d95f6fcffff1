"""Recurrent layers by the vendor's library, called by nn's LSTM and GRU; no public function."""
