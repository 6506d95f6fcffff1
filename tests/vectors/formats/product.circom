pragma circom 2.0.0;
template T() { signal input a; signal input b; signal input c; signal output o; signal x; x <== a*b; o <== x*(c+3) + 5*a; }
component main {public [a]} = T();
