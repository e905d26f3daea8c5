# Trains an adapter to answer a question, and samples its answer: every kind of call, the details of errors, deadlines
# and cancellation, with the gem grpc.
#   buf generate
#   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... ruby -I gen program.rb
require 'digest'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'grpc'
require 'securerandom'
require 'twinkle/api/model/v1/adapter_service_services_pb'
require 'twinkle/api/model/v1/training_service_services_pb'
require 'twinkle/api/sampler/v1/sampler_service_services_pb'
require 'twinkle/api/server/v1/server_service_services_pb'

# Not `include Twinkle::Api`, because the class Data of Ruby 3.2 would hide Twinkle::Api::Data.
Chats = Twinkle::Api::Data::V1
Model = Twinkle::Api::Model::V1
Sampler = Twinkle::Api::Sampler::V1
Server = Twinkle::Api::Server::V1
Tensors = Twinkle::Api::Tensor::V1

ADDRESS = ENV.fetch('TWINKLE_SERVER_URL').delete_prefix('http://').delete_prefix('https://')
KEY = { 'authorization' => "Bearer #{ENV.fetch('TWINKLE_API_KEY')}" }.freeze
MODEL = ENV.fetch('TWINKLE_MODEL', 'smollm2-135m-instruct')
# The certificate authority of the gateway, if it uses TLS.
CREDENTIALS =
  if ENV['TWINKLE_CA']
    GRPC::Core::ChannelCredentials.new(File.read(ENV['TWINKLE_CA']))
  else
    :this_channel_is_insecure
  end
STEPS = 12
NO_LABEL = -100
# The batch of this program is small; chunks of 1 MiB are recommended.
CHUNK_BYTES = 256

# Stubs of the same address share one connection.
SERVER = Server::ServerService::Stub.new(ADDRESS, CREDENTIALS)
ADAPTERS = Model::AdapterService::Stub.new(ADDRESS, CREDENTIALS)
TRAINING = Model::TrainingService::Stub.new(ADDRESS, CREDENTIALS)
SAMPLER = Sampler::SamplerService::Stub.new(ADDRESS, CREDENTIALS)

# Returns the options of a call: a call without a deadline would wait for a lost server indefinitely.
def within(seconds)
  { metadata: KEY, deadline: Time.now + seconds }
end

def int32_tensor(values)
  Tensors::Tensor.new(dtype: :DTYPE_INT32, shape: [values.size], data: values.pack('l<*'))
end

def sample_request(prompt, adapter: nil, **params)
  Sampler::SampleRequest.new(
    base_model: MODEL, prompt: prompt, adapter: adapter, params: Sampler::SamplingParams.new(**params)
  )
end

def chat(question)
  message = Chats::Message.new(role: :ROLE_USER, parts: [Chats::ContentPart.new(text: question)])
  trajectory = Chats::Trajectory.new(messages: [message])
  Sampler::Prompt.new(chat: Sampler::ChatPrompt.new(trajectory: trajectory))
end

# Returns the tokens of a prompt as the server converts it. A request for 0 tokens receives only the event `prompt`.
def tokens_of(prompt)
  responses = SAMPLER.sample(sample_request(prompt, max_tokens: 0), **within(60))
  responses.filter_map(&:prompt).first.token_ids.data.unpack('l<*')
end

# Returns a batch with one example: the tokens of the question, and those of the answer, which are learned.
def batch_of(question, answer)
  asked = tokens_of(question)
  tokens = asked + tokens_of(Sampler::Prompt.new(text: answer))
  # Labels are shifted: the label of a position is the next token.
  labels = [NO_LABEL] * (asked.size - 1) + tokens.drop(asked.size) + [NO_LABEL]
  feature = Chats::InputFeature.new(input_ids: int32_tensor(tokens), labels: int32_tensor(labels))
  Chats::FeatureBatch.new(features: [feature])
end

# Sends bytes in a stream of a header and chunks, and returns the id of the upload.
def upload(bytes, adapter_id)
  header = Model::BatchHeader.new(
    upload_id: SecureRandom.uuid,
    size_bytes: bytes.bytesize,
    adapter_id: adapter_id,
    sha256: Digest::SHA256.digest(bytes)
  )
  chunks = (0...bytes.bytesize).step(CHUNK_BYTES).lazy.map do |offset|
    chunk = Tensors::TensorChunk.new(offset: offset, data: bytes.byteslice(offset, CHUNK_BYTES))
    Model::UploadBatchRequest.new(chunk: chunk)
  end
  requests = [Model::UploadBatchRequest.new(header: header)].each + chunks
  uploaded = TRAINING.upload_batch(requests, **within(60))
  puts "uploaded: #{uploaded.committed_bytes}"
  uploaded.upload_id
end

# Runs operations in one stream, and returns their results. The service runs them in the order of their numbers, so the
# program need not wait for a result before it sends the next operation.
def train(adapter_id, verbs)
  requests = verbs.each.with_index(1).lazy.map do |verb, number|
    operation = Model::Operation.new(adapter_id: adapter_id, sequence_number: number, **verb)
    Model::TrainRequest.new(operation: operation)
  end
  TRAINING.train(requests, **within(300)).map do |response|
    # A failed operation does not end the stream.
    raise response.result.error.message if response.result.error

    response.result
  end
end

# Creates an adapter, and returns its id. A repeated request with the same id returns the same adapter.
def create_adapter(lora_rank:)
  request = Model::CreateAdapterRequest.new(
    request_id: SecureRandom.uuid, base_model: MODEL, lora_config: Model::LoraConfig.new(lora_rank: lora_rank)
  )
  ADAPTERS.create_adapter(request, **within(60)).adapter.adapter_id
end

def main
  info = SERVER.get_server_info(Server::GetServerInfoRequest.new, **within(60))
  puts "models: #{info.services.flat_map { |service| service.base_models.map(&:base_model) }.uniq.join(' ')}"

  adapter_id = create_adapter(lora_rank: 8)
  question = chat('Who are you?')
  bytes = Chats::FeatureBatch.encode(batch_of(question, 'I am Twinkle, and I train models.'))
  batch = Model::Batch.new(upload_id: upload(bytes, adapter_id))

  step = [
    { forward_backward: Model::ForwardBackward.new(batch: batch) },
    { clip_grad_and_step: Model::ClipGradAndStep.new(learning_rate: 0.005) }
  ]
  results = train(adapter_id, step * STEPS + [{ publish_version: Model::PublishVersion.new }])
  losses = results.filter_map(&:forward).map { |forward| format('%.4f', forward.loss / forward.label_count) }
  puts "losses: #{losses.join(' ')}"

  weights = Sampler::AdapterRef.new(adapter_id: adapter_id, exact: results.last.publish.version)
  responses = SAMPLER.sample(sample_request(question, adapter: weights, max_tokens: 20, temperature: 0), **within(60))
  puts "sampled: #{responses.filter_map { |event| (event.delta || event.finished)&.text }.join}"

  refuse
  exceed_deadline
  cancel(question)
end

# Reads why a request was refused from the trailing metadata of the error.
def refuse
  create_adapter(lora_rank: -1)
rescue GRPC::InvalidArgument => e
  details = e.to_rpc_status.details
  reason = details.filter_map { |detail| detail.unpack(Google::Rpc::ErrorInfo) }.first.reason
  invalid = details.filter_map { |detail| detail.unpack(Google::Rpc::BadRequest) }.first.field_violations.first
  puts "refused: #{reason} #{invalid.field}"
end

# Follows the load, which does not end, until the deadline of the call.
def exceed_deadline
  SAMPLER.watch_load(Sampler::WatchLoadRequest.new, **within(0.5)).each { |_| }
rescue GRPC::DeadlineExceeded
  puts 'deadline: DEADLINE_EXCEEDED'
end

# Cancels a stream after its first event. The sampler then ends its sequence.
def cancel(question)
  request = sample_request(question, is_eos_ignored: true)
  operation = SAMPLER.sample(request, return_op: true, **within(60))
  operation.execute.each { |_| operation.cancel }
rescue GRPC::Cancelled
  puts 'cancelled: CANCELLED'
end

main
