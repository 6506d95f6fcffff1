// Compiles a contract, deploys it on an Ethereum virtual machine and calls it.
// In, as JSON on stdin: {source, name, calls: [[word, ...], ...]}, words of 64 hexadecimal digits.
// Out: {method, bytes, results: [{word, gas, error}, ...]}: the signature, size of the code, and the answers.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createEVM } from "@ethereumjs/evm";
import { Address, bytesToHex, createAddressFromString, hexToBytes } from "@ethereumjs/util";

const solc = createRequire(import.meta.url)("solc");
const { source, name, calls } = JSON.parse(readFileSync(0, "utf8"));
const settings = {
  optimizer: { enabled: true, runs: 200 },
  outputSelection: { "*": { "*": ["evm.bytecode.object", "evm.deployedBytecode.object", "evm.methodIdentifiers"] } },
};
const output = JSON.parse(solc.compile(JSON.stringify({
  language: "Solidity", sources: { "verifier.sol": { content: source } }, settings,
})));
if (output.errors?.length) {
  console.error(output.errors.map((each) => each.formattedMessage).join("\n"));
  process.exit(1);
}
const { bytecode, deployedBytecode, methodIdentifiers } = output.contracts["verifier.sol"][name].evm;
const [[method, selector]] = Object.entries(methodIdentifiers);
const evm = await createEVM();
const gasLimit = 30_000_000n;
const deployed = await evm.runCall({ data: hexToBytes(`0x${bytecode.object}`), gasLimit });
if (deployed.execResult.exceptionError) {
  console.error(`deployment: ${deployed.execResult.exceptionError.error}`);
  process.exit(1);
}
const results = [];
for (const words of calls) {
  const { execResult } = await evm.runCall({
    to: deployed.createdAddress, data: hexToBytes(`0x${selector}${words.join("")}`), gasLimit, isStatic: true,
  });
  results.push({
    word: bytesToHex(execResult.returnValue), gas: Number(execResult.executionGasUsed),
    error: execResult.exceptionError?.error ?? null,
  });
}
console.log(JSON.stringify({ method, bytes: deployedBytecode.object.length / 2, results }));
