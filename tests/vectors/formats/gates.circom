pragma circom 2.1.0;
pragma custom_templates;
template custom G(k) { signal input a; signal output o; o <-- a*a; }
template T() { signal input a; signal output o; component g = G(7); g.a <== a; signal z; z <== a*g.o; o <== z; }
component main = T();
