// Runs http-cache-tests (cache-tests.fyi) against a cache: node http_suite.mjs FOLDER URL [ID]...
// FOLDER is the unpacked package; with IDs only these tests run, few at once. Prints {id: [kind, true or what went wrong]} as JSON.
const [folder, base, ...ids] = process.argv.slice(2)
const { runTests, getResults } = await import(`${folder}/client/runner.mjs`)
const { default: fetch } = await import(`${folder}/node_modules/node-fetch/lib/index.js`)
const { default: suites } = await import(`${folder}/tests/index.mjs`)

const isWanted = test => !ids.length || ids.includes(test.id)
const wanted = suites.map(suite => ({ ...suite, tests: suite.tests.filter(isWanted) }))
await runTests(wanted, fetch, false, base, ids.length ? 10 : 90)
const kinds = new Map(suites.flatMap(suite => suite.tests.map(test => [test.id, test.kind ?? 'required'])))
const ended = Object.entries(getResults()).map(([id, how]) => [id, [kinds.get(id), how]])
console.log(JSON.stringify(Object.fromEntries(ended)))
