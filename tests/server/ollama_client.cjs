// Asks a server with ollama's official JavaScript client, and prints what it got as one JSON object.
//     NODE_PATH=FOLDER node ollama_client.cjs URL MODEL       (FOLDER: where npm has put `ollama`)
const { Ollama } = require('ollama')

const [host, model] = process.argv.slice(2)
const client = new Ollama({ host })
const messages = [{ role: 'user', content: 'hello' }]
const options = { temperature: 0, num_predict: 8 }
const parameters = { type: 'object', properties: {} }
const weather = { name: 'weather', description: 'Tells the weather.', parameters }
const tools = [{ type: 'function', function: weather }]

async function joined(pieces, textOf) {
  let text = ''
  for await (const piece of pieces) text += textOf(piece)
  return text
}

async function pieceCountUntilAbort() {
  const pieces = await client.chat({ model, messages, stream: true, options: { num_predict: 900 } })
  let count = 0
  try {
    for await (const _ of pieces) if (++count === 3) client.abort()
  } catch (error) {
    return [error.name, count]
  }
  return ['ended', count]
}

async function statusOf(asked) {
  return asked.then(() => null, (error) => [error.name, error.status_code])
}

async function main() {
  const called = await client.chat({ model, messages, tools, options: { num_predict: 80 } })
  const result = { role: 'tool', tool_name: 'weather', content: 'rain' }
  const conversation = [...messages, called.message, result]
  const again = await client.chat({ model, messages: conversation, tools, options })
  // A stream is read at once: Node cancels one that waits until its response is garbage.
  const stream = await client.chat({ model, messages, options, stream: true })
  const streamed = await joined(stream, (piece) => piece.message.content)
  const pieces = await client.generate({ model, prompt: 'hello', options, stream: true })
  const joinedPieces = await joined(pieces, (piece) => piece.response)
  const vectors = await client.embed({ model, input: ['hello', 'a river'] })
  const answers = {
    called: called.message.tool_calls,
    again: again.eval_count,
    chat: (await client.chat({ model, messages, options })).message.content,
    stream: streamed,
    generate: (await client.generate({ model, prompt: 'hello', options })).response,
    pieces: joinedPieces,
    vectors: vectors.embeddings.map((vector) => vector.length),
    vector: (await client.embeddings({ model, prompt: 'hello' })).embedding.length,
    names: (await client.list()).models.map((row) => row.name),
    open: (await client.ps()).models.map((row) => row.name),
    able: (await client.show({ model })).capabilities,
    version: (await client.version()).version,
    missing: await statusOf(client.chat({ model: 'nonsense', messages })),
    aborted: await pieceCountUntilAbort(),
  }
  console.log(JSON.stringify(answers))
}

main()
